"""Heads from elsewhere whose files contradict themselves are refused with a sentence, whatever is wrong in them."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from draft_heads.heads.checkpoint import load_head, read_config
from draft_heads.heads.export.formats import read_folder, write_folder
from draft_heads.inference.drafters.registry import DrafterSpec
from draft_heads.inference.target.target import Target
from tests.heads.test_export import TARGET, eagle3, medusa
from tests.inference.models import make_head
from tests.running import run_script


@pytest.mark.parametrize("form", ["eagle3", "speculators", "vllm-medusa", "tgi-medusa"])
def test_a_head_in_another_form_is_answered_with_the_script_that_reads_it(tmp_path, form):
    """Named as a drafter it is no draft model, though its config.json may have a model_type."""
    head = eagle3() if form in ("eagle3", "speculators") else medusa()
    write_folder(head, form, tmp_path / "x", TARGET, "some/target")
    told = rf"has a head in another form, {form}; read it once with scripts/import_head\.py --head .*x --target TARGET"
    for read in (lambda: read_config(tmp_path / "x"), lambda: DrafterSpec.parse(f"mine={tmp_path}/x")):
        with pytest.raises(ValueError, match=told):
            read()


def swapped(ids):
    """The same tokens for other rows."""
    tokens = torch.arange(len(ids)) + ids
    tokens[[3, 7]] = tokens[[7, 3]]
    return tokens - torch.arange(len(ids))


def put(where, **changed):
    """Replaces tensors or settings by functions of what they were."""
    return lambda config, tensors: (config if where == "config" else tensors).update(
        {name.replace("__", "."): new((config if where == "config" else tensors)[name.replace("__", ".")])
         for name, new in changed.items()}
    )  # fmt: skip


def added(config, tensors):
    """A permuting d2t of a head that drafts from all tokens, which would otherwise be left unread."""
    tensors["d2t"] = swapped(torch.zeros(61, dtype=torch.int64))


def poisoned(value):
    return lambda x: x.index_fill(0, torch.tensor([1]), value)


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = "eagle_aux_hidden_state_layer_ids must be a list of layer numbers; got"
EAGLE = [
    (40, put("tensors", d2t=swapped), "in no strictly ascending order"),
    (
        40,
        put("tensors", d2t=lambda x: x.index_fill(0, torch.tensor([5]), int(x[4]) - 1)),
        "no strictly ascending order",
    ),
    (40, put("tensors", d2t=lambda x: x - 1000), "out of range"),
    (40, put("tensors", d2t=lambda x: x.float()), "d2t must be 40 whole numbers.*; got torch.float32"),
    (40, put("tensors", d2t=lambda x: x[:-1]), r"d2t must be 40 whole numbers.* of shape \(39,\)"),
    (
        40,
        put("tensors", t2d=lambda x: x.roll(1)),
        r"t2d must mark the 40 of 61 tokens that d2t names; \d+ tokens differ",
    ),
    (40, put("tensors", t2d=lambda x: torch.ones(61, dtype=torch.bool)), "; 21 tokens differ; copy the folder again"),
    (40, put("tensors", t2d=lambda x: x[:-1]), "t2d must mark .*; another size"),
    (0, added, "in no strictly ascending order"),
    (
        0,
        put("tensors", fc__weight=poisoned(math.nan)),
        r"layer_projection.weight has \d+ values that are infinite or not",
    ),
    (0, put("tensors", norm__weight=poisoned(math.inf)), "norm.weight has 1 values that are infinite or not a number"),
    (
        0,
        put("tensors", lm_head__weight=lambda x: x.to(torch.int8)),
        "lm_head.weight is of type int8, no floating-point",
    ),
    (0, put("config", eagle_config=lambda x: x | {"eagle_aux_hidden_state_layer_ids": ["1", "4", "8"]}), LAYERS),
    (0, put("config", eagle_config=lambda x: x | {"eagle_aux_hidden_state_layer_ids": [-1, 4, 8]}), LAYERS),
    (0, put("config", eagle_config=lambda x: None, eagle_aux_hidden_state_layer_ids=lambda x: ["2", "5", "9"]), LAYERS),
    (0, put("config", eagle_config=lambda x: None, eagle_aux_hidden_state_layer_ids=lambda x: 2.0), LAYERS),
    (0, put("config", eagle_config=lambda x: x | {"norm_output": True}), "norm_output must be False; got True"),
    (
        0,
        put("config", eagle_config=lambda x: x | {"return_hidden_post_norm": True}),
        "return_hidden_post_norm must be False; got True",
    ),
    (
        0,
        put("config", eagle_config=lambda x: x | {"use_last_layernorm": False}),
        "use_last_layernorm must be True; got",
    ),
    (0, put("config", eagle_config=lambda x: x | {"parallel_draft_step": 4}), "parallel_draft_step must be 1; got 4"),
    (0, put("config", hidden_size=str), "hidden_size must be a whole number; got '32'"),
    (
        0,
        put("config", num_attention_heads=lambda x: 0),
        "num_attention_heads must be at least 1; got 0",
    ),
    (0, put("config", intermediate_size=lambda x: None), "intermediate_size must be a whole number.*; got None"),
    (0, put("config", head_dim=str), "head_dim must be of type int; got"),
    (0, put("config", rms_norm_eps=lambda x: math.inf), "rms_norm_eps must be a positive number; got inf"),
    (
        0,
        put("config", rope_parameters=lambda x: x | {"rope_theta": -1.0}, rope_theta=lambda x: -1.0),
        "rope_theta must be a positive number; got -1.0",
    ),
    (
        0,
        put("config", rope_parameters=lambda x: {"full_attention": x | {"rope_type": "yarn", "factor": 4}}),
        "rotary positions are of type yarn",
    ),
    (
        0,
        put("config", rope_parameters=lambda x: {"full_attention": x, "sliding_attention": x | {"rope_theta": 5.0}}),
        r"one block with one rope_theta; config.json has 10000\.0 and 5\.0; correct one",
    ),
    (0, put("config", rope_theta=lambda x: 5.0), "config.json has 10000.0 and 5.0; correct one"),
]
MEDUSA = [
    (
        0,
        put("tensors", lm_heads__0__weight=poisoned(math.nan)),
        "heads.0.vocabulary.weight has 32 values that are infinite",
    ),
    (0, put("config", logit_scale=lambda x: math.nan), "logit_scale must be a positive number; got nan"),
    (0, put("config", hidden_size=str), "hidden_size must be of type int; got '32'"),
    (40, put("tensors", token_map=lambda x: x.flip(0)), "in no strictly ascending order"),
    (40, put("tensors", token_map=lambda x: x.int()), "must be 40 ascending int64 token ids"),
]


@pytest.mark.parametrize(
    "name, size, change, told",
    [("eagle3", *case) for case in EAGLE] + [("vllm-medusa", *case) for case in MEDUSA],
)
def test_what_contradicts_itself_is_refused(tmp_path, name, size, change, told):
    head = (eagle3 if name == "eagle3" else medusa)(**({"draft_vocab_size": size} if size else {}))
    write_folder(head, name, tmp_path, TARGET, "t")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    config.setdefault("logit_scale", 1.0)
    read_folder(tmp_path)
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=told):
        read_folder(tmp_path)


def changed(name, folder, changes):
    """A head that reads layers 2, 5 and 9, whose config.json says something else beside."""
    write_folder(eagle3(), name, folder, TARGET, "t")
    config = json.loads((folder / "config.json").read_text())
    changes(config, config.get("transformer_layer_config", config))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["eagle3", "speculators"])
def test_a_head_that_sees_a_window_of_its_text_is_refused(tmp_path, name):
    """Newer trainers write them; read as one that sees all, it would draft worse in every text beyond the window."""

    def seen(kind):
        return lambda _, block: block.update(layer_types=[kind], sliding_window=2048)

    assert read_folder(changed(name, tmp_path / "all", seen("full_attention"))).config.target_layers == [2, 5, 9]
    with pytest.raises(ValueError, match="layer_types must be 'full_attention'; got 'sliding_attention'"):
        read_folder(changed(name, tmp_path / "window", seen("sliding_attention")))


def test_layers_that_are_counted_nobody_knows_from_what_are_asked_for(tmp_path):
    """Of `eagle_config` alone; a head whose lowest layer is 2 begins with 1 there in one counting only."""

    def alone(*ids):
        given = {"eagle_config": {LAYER_IDS: [*ids]}}
        return changed(
            "eagle3", tmp_path / str(ids[0]), lambda config, _: config.pop(LAYER_IDS) and config.update(given)
        )

    assert read_folder(alone(1, 4, 8)).config.target_layers == [2, 5, 9]
    with pytest.raises(ValueError, match=r"names the layers, \[2, 5, 9\], .* as --target_layers 2 5 9 or 3 6 10"):
        read_folder(folder := alone(2, 5, 9))
    assert read_folder(folder, target_layers=[2, 5, 9]).config.target_layers == [2, 5, 9]


@pytest.mark.parametrize(
    ("layers", "family", "told"), [([2, 5, 9], "llama", 0), ([1, 5, 9], "llama", 1), ([2, 5, 9], "gpt_oss", 1)]
)
def test_an_export_says_where_versions_of_sglang_differ(tmp_path, caplog, layers, family, told):
    head = eagle3()
    head.config.target_layers = layers
    write_folder(head, "eagle3", tmp_path, SimpleNamespace(**vars(TARGET), model_type=family), "t")
    lines = [line for line in caplog.messages if line.startswith("SGLang reads the layers from eagle_config")]
    assert len(lines) == told and all(f"write {' '.join(map(str, layers))} in their place" in line for line in lines)


def test_an_empty_list_of_layers_names_none(tmp_path):
    layers = "eagle_aux_hidden_state_layer_ids"
    inner = changed("eagle3", tmp_path / "inner", lambda config, _: config.update({layers: []}))
    outer = changed("eagle3", tmp_path / "outer", lambda config, _: config.update(eagle_config={layers: []}))
    assert [read_folder(one).config.target_layers for one in (inner, outer)] == [[2, 5, 9]] * 2

    none = changed(
        "eagle3", tmp_path / "none", lambda config, _: config.update({layers: [], "eagle_config": {layers: []}})
    )
    specs = changed("speculators", tmp_path / "specs", lambda config, _: config.update({layers: []}))
    for folder in (none, specs):
        with pytest.raises(ValueError, match=r"names no layers of the target .* as --target_layers LOW MIDDLE HIGH"):
            read_folder(folder)
        assert read_folder(folder, target_layers=[1, 2, 3]).config.target_layers == [1, 2, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_checkpoint_with_weights_that_are_no_numbers_is_refused(tmp_path, value):
    head = medusa()
    head.offset_heads[0].vocabulary.weight.data[3, 5] = value
    head.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"heads.0.vocabulary.weight has 1 values that are infinite or not a number"):
        load_head(tmp_path)


def test_layers_that_the_target_lacks_are_exported_no_more_than_imported(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4}
    LlamaConfig(**sizes, num_hidden_layers=9).save_pretrained(tmp_path / "target")
    head = eagle3()  # reads layers 2, 5 and 9
    head.config.target = str(tmp_path / "target")
    head.save_pretrained(tmp_path / "head")
    flags = "--head", str(tmp_path / "head"), "--format", "eagle3", "--output", str(tmp_path / "out")
    status, told = run_script("scripts/export.py", *flags)
    assert status != 0 and "target_layers are ascending numbers from 1 to 8, " in told and "got 2 5 9; pick" in told
    assert not (tmp_path / "out").exists()


def test_flags_beside_the_layers_are_read_also_where_other_layers_are_given(tmp_path):
    folder = changed("eagle3", tmp_path, lambda config, sizes: config["eagle_config"].update(norm_output=True))
    with pytest.raises(ValueError, match="norm_output must be False"):
        read_folder(folder, target_layers=[2, 5, 9])


def test_an_import_says_how_deep_a_head_drafts_and_that_it_names_another_target(tmp_path):
    target = Target.from_pretrained("tests/tiny_target", device="cpu")
    write_folder(
        make_head(target, "eagle3", target_layers=[1, 2, 3], passes=3), "eagle3", tmp_path / "in", TARGET, "a/b"
    )
    flags = "--head", str(tmp_path / "in"), "--target", "tests/tiny_target", "--output"
    status, told = run_script("scripts/import_head.py", *flags, str(tmp_path / "7"))
    assert status == 0 and "drafts up to 7 tokens" in told and "says that it is for a/b; tests/tiny_target has" in told
    status, told = run_script("scripts/import_head.py", *flags, str(tmp_path / "3"), "--passes", "3")
    assert status == 0 and load_head(tmp_path / "3", None).config.passes == 3
    write_folder(make_head(target, "medusa"), "vllm-medusa", tmp_path / "m", TARGET, "/models/tiny_target")
    status, told = run_script("scripts/import_head.py", "--head", str(tmp_path / "m"), *flags[2:], str(tmp_path / "n"))
    assert status == 0 and "says that" not in told
    more = str(tmp_path / "o"), "--passes", "3"
    status, told = run_script("scripts/import_head.py", "--head", str(tmp_path / "m"), *flags[2:], *more)
    assert status == 1 and "--passes are those of an EAGLE-3 head" in told


@pytest.mark.parametrize("made_for", ["tests/tiny_target", ""])
def test_an_export_for_another_target_says_that_only_sizes_were_compared(tmp_path, made_for):
    head = make_head(Target.from_pretrained("tests/tiny_target", device="cpu"), "medusa")
    head.config.target = made_for
    head.save_pretrained(tmp_path / "head")
    shutil.copytree("tests/tiny_target", tmp_path / "other")
    flags = "--head", str(tmp_path / "head"), "--format", "vllm-medusa", "--check", "--output"
    why = "says that it is for tests/tiny_target" if made_for else "does not say what it is for"
    for number, name in enumerate([tmp_path / "other", Path("tests/tiny_target").resolve()]):
        status, told = run_script("scripts/export.py", *flags, str(tmp_path / str(number)), "--target", str(name))
        note = f"note: {tmp_path / 'head'} {why}; {name} has its sizes, the weights may differ"
        assert status == 0 and (note in told) == (number == 0 or not made_for), told


def test_medusa_folders_that_engines_load_are_read(tmp_path):
    """A shared LM head that is there as the first offset's, and names with the prefix of a whole model."""
    head = medusa()
    with torch.no_grad():
        for one in head.offset_heads[1:]:
            one.vocabulary.weight.copy_(head.offset_heads[0].vocabulary.weight)
    write_folder(head, "vllm-medusa", tmp_path, TARGET, "t")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not name.startswith("lm_heads.") or name == "lm_heads.0.weight"}
    save_file({f"medusa_heads.{name}": x for name, x in kept.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"original_lm_head": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_folder(tmp_path)
    for name, weight in head.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
