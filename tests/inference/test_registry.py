"""Drafters from the words of a command line, and a target with an adapter laid on it."""

import copy
import json
import shutil

import pytest
import torch

from draft_heads.data.fingerprint import weights_hashes
from draft_heads.heads.checkpoint import load_head
from draft_heads.inference.drafters import words as words_module
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.heads.ctc import CTCDrafter
from draft_heads.inference.drafters.registry import (
    HEAD_DRAFTERS,
    DrafterBuilder,
    DrafterPart,
    DrafterSpec,
    build_drafter,
)
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import write_tuned
from tests.inference.models import make_head

TINY = "tests/tiny_target"


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained(TINY, device="cpu")


@pytest.fixture(scope="module")
def checkpoint(target, tmp_path_factory):
    head = make_head(target)
    head.config.target_fingerprint = target.fingerprint()
    folder = tmp_path_factory.mktemp("run") / "head"
    head.save_pretrained(folder)
    return folder


def test_the_kind_comes_from_the_checkpoint_and_options_from_the_words(target, checkpoint):
    spec = DrafterSpec.parse(f"mine={checkpoint},tree=raw,max_nodes=5")
    drafter = build_drafter(spec, target, 32)
    assert spec.name == "mine" and isinstance(drafter, CTCDrafter)
    assert (drafter.tree, drafter.max_nodes) == ("raw", 5)
    again = build_drafter(DrafterSpec.parse(f"ctc=ctc:{checkpoint}"), target, 32)
    assert isinstance(again, CTCDrafter) and (again.tree, again.max_nodes) == ("prefix", 32)


def test_what_loads_nothing_may_have_options(target):
    drafter = build_drafter(DrafterSpec.parse("ngram,k=3,n=4"), target)
    assert drafter.max_depth == 3 and DrafterSpec.parse("ngram,k=3,n=4").name == "ngram"
    with pytest.raises(ValueError, match="drafter is one of"):
        DrafterSpec.parse("mine,k=3")


def test_a_name_alone_is_a_drafter_that_loads_nothing(target):
    assert isinstance(build_drafter(DrafterSpec.parse("vanilla"), target), VanillaDrafter)


@pytest.mark.parametrize(
    "text,told",
    [
        ("", "NAME"),
        ("=x", "NAME"),
        ("ctc=", "NAME"),
        ("magic", "chimera, ctc"),
        ("ctc=somewhere/missing/head", "does not exist"),
        ("v=vanilla,tree", "key=value"),
        ("vanilla=ngram", "the name vanilla is that of decoding without drafts; got 'vanilla=ngram'; rename"),
        ("tuned=tree.json", "tuned=FILE is no drafter .* got 'tuned=tree.json'; write it after a head"),
        ("a=ngram,tuned=tree.json", "a ngram drafter takes no tuned=FILE; .* as in ctc=RUN/head,tuned=FILE"),
        ("a=ctc:head,tuned=no.json", "tuned= needs a file of scripts/tune_tree.py .* no.json"),
    ],
)
def test_malformed_words_are_refused(text, told):
    with pytest.raises(ValueError, match=told):
        DrafterSpec.parse(text)


@pytest.mark.parametrize(
    "options,told",
    [("tree=beam", "prefix, chain, raw, plain"), ("size=3", "unknown option size"), ("max_nodes=many", "whole number")],
)
def test_options_that_make_no_sense_are_refused(target, checkpoint, options, told):
    with pytest.raises(ValueError, match=told):
        build_drafter(DrafterSpec.parse(f"ctc={checkpoint},{options}"), target)


@pytest.mark.parametrize(
    "words,told",
    [
        ("ngram,size=3", "unknown option size of a ngram drafter; valid are"),
        ("ngram+lookahead,size=3", "unknown option size of a lookahead drafter"),
        ("x=magic:some/path", "known kinds are cascade, chimera, ctc"),
        ("ctc", "ctc needs a path; got none; write ctc=RUN/head"),
        ("rest,k=3", "rest needs a path; got none; write rest=DATASTORE"),
        ("a=ngram:some/path", "ngram loads nothing; got the path 'some/path'; write ngram alone"),
        ("lookahead,n=5,max_nodes=7", "n=5 needs at least 8 nodes .* got max_nodes=7"),
        ("both=vanilla+vanilla", "combines vanilla"),
        ("both=ngram,branches=2+prompt_lookup", r"the shared tree decides .* got branches=2; leave it out"),
        ("both=prompt_lookup,k=3+ngram,k=1", r"gives k to ngram.* got k=1; leave it out: depth=N bounds the depth"),
        (
            "both=prompt_lookup+ngram,max_nodes=5",
            r"gives max_nodes to ngram.* got max_nodes=5; .* --max_nodes its nodes",
        ),
        ("both=ngram+lookahead,max_nodes=7", "n=5 needs at least 8 nodes .* got max_nodes=7; raise it"),
        ("both=ngram,depth=3+prompt_lookup,depth=9", "gives depth=3 and depth=9; a hybrid has one"),
        ("ngram,k=12,max_nodes=8", "a draft of k=12 tokens has as many nodes; got max_nodes=8; lower k, or raise"),
    ],
)
def test_mistakes_in_a_drafter_are_found_before_a_target_is_loaded(words, told):
    with pytest.raises(ValueError, match=told):
        DrafterSpec.parse(words)


def test_a_draft_longer_than_the_budget_that_was_asked_for_is_refused_and_a_default_is_cut(target):
    for words in ("ngram,k=12", "prompt_lookup,k=12", "self_speculative,k=12"):
        with pytest.raises(ValueError, match=r"k=12 .* max_nodes=8; .* for this drafter alone with max_nodes=12"):
            build_drafter(DrafterSpec.parse(words), target, 8)
    for words, longest in (("ngram,k=12,max_nodes=12", 12), ("ngram", 4)):
        assert build_drafter(DrafterSpec.parse(words), target, 4).max_depth == longest
    assert build_drafter(DrafterSpec.parse("ngram,k=40"), target, 64).max_depth == 40


@pytest.mark.parametrize(("config", "kind"), [({"model_type": "llama"}, "draft_model"), ({"kind": "ctc"}, "ctc")])
def test_the_kind_of_what_a_hub_id_names_is_read_from_its_config_alone(tmp_path, monkeypatch, config, kind):
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def cached_file(source, name, **_):
        asked.append((source, name))
        return str(tmp_path / name)

    monkeypatch.setattr(words_module, "cached_file", cached_file)
    monkeypatch.setattr(words_module, "read_config", lambda source: config)
    spec = DrafterSpec.parse("small=someone/model")
    assert [(part.kind, part.path) for part in spec.parts] == [(kind, "someone/model")]
    assert set(asked) == {("someone/model", "config.json")}


@pytest.mark.parametrize("kind", HEAD_DRAFTERS)
def test_a_drafter_refuses_a_head_of_another_kind_in_a_sentence(target, kind):
    other = "ctc" if kind == "medusa" else "medusa"
    with pytest.raises(ValueError, match=f"drafts with {kind} heads; got a {other} head"):
        HEAD_DRAFTERS[kind](make_head(target, other), target.view())


def test_an_adapter_is_merged_into_the_target(target, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    ).eval()
    adapted.save_pretrained(tmp_path)
    merged = Target.from_pretrained(TINY, device="cpu", adapter=str(tmp_path))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        plain = target.model(input_ids=ids).logits
        got = merged.model(input_ids=ids).logits
    assert torch.allclose(got, expected, atol=1e-4)
    assert not torch.allclose(got, plain, atol=1e-2)


def test_prompts_are_rendered_with_the_chat_template_that_an_adapter_comes_with(target, tmp_path, caplog):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"])).save_pretrained(tmp_path)
    tokenizer = copy.deepcopy(target.tokenizer)
    messages = [{"role": "user", "content": "Name a fruit."}]

    def prompt(**given):
        return Target.from_pretrained(TINY, device="cpu", adapter=str(tmp_path), **given).renderer.prompt(messages)

    plain = target.renderer.prompt(messages)
    assert prompt() == plain  # it comes without a tokenizer
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level("INFO", "draft_heads.inference"):
        assert prompt() == plain and "chat template" not in caplog.text
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        tokenizer.save_pretrained(tmp_path)
        assert target.tokenizer.decode(prompt()) == f"user: Name a fruit.{tokenizer.eos_token}assistant: "
        assert f"{tmp_path} comes with a chat template: taken" in caplog.text
    (tmp_path / "asked.jinja").write_text(target.tokenizer.chat_template)
    assert prompt(chat_template=str(tmp_path / "asked.jinja")) == plain


@pytest.mark.parametrize("begins, ends", [("<|turn|>", "<|over|>"), ("", "{{ eos_token }}")])
def test_the_tokens_that_an_adapters_template_writes_are_those_of_its_tokenizer(target, tmp_path, caplog, begins, ends):
    """With the target's `<|turn|>` would be spelled in pieces, and no answer would end at `<|over|>`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.resize_token_embeddings(len(target.tokenizer) + 8)  # rows that no token of the target's tokenizer has
    model.save_pretrained(base)
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.save_pretrained(base)
    get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"])).save_pretrained(adapter)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|over|>"]})
    if not begins:
        tokenizer.eos_token = "<|over|>"
    tokenizer.chat_template = (
        "{% for message in messages %}BEGINS{{ message.role }}: {{ message.content }}ENDS{% endfor %}"
        "{% if add_generation_prompt %}BEGINSassistant: {% endif %}"
    ).replace("BEGINS", begins)
    tokenizer.chat_template = tokenizer.chat_template.replace("ENDS", ends)
    tokenizer.save_pretrained(adapter)
    with caplog.at_level("INFO", "draft_heads.inference"):
        adapted = Target.from_pretrained(str(base), device="cpu", adapter=str(adapter))
    assert f"{adapter} comes with tokens and a chat template: taken in place" in caplog.text
    messages = [{"role": "user", "content": "Name a fruit."}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    turn, over = tokenizer.convert_tokens_to_ids(["<|turn|>", "<|over|>"])
    assert adapted.renderer.prompt(messages) == expected and over in expected and (turn in expected) == bool(begins)
    assert over in adapted.end_token_ids
    # a template that is asked for replaces the template, and no token
    (tmp_path / "asked.jinja").write_text("ASKED " + tokenizer.chat_template)
    asked = Target.from_pretrained(
        str(base), device="cpu", adapter=str(adapter), chat_template=f"{tmp_path}/asked.jinja"
    )
    prompt = asked.renderer.prompt(messages)
    assert tokenizer.decode(prompt) == f"ASKED {tokenizer.decode(expected)}"
    assert over in prompt and over in asked.end_token_ids


@pytest.mark.parametrize("templated", [True, False])
@pytest.mark.parametrize("added, name, taken", [("<|tool|>", "additional", True), ("<|pad|>", "pad", False)])
def test_tokens_that_an_adapter_adds_are_written_and_shown_where_no_template_has_them(
    target, tmp_path, templated, added, name, taken
):
    """With the target's tokenizer a question would spell `<|tool|>` in pieces, and an answer would not show it. One to
    pad with stands in no text: heads of the target go on fitting."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.resize_token_embeddings(len(target.tokenizer) + 8)
    model.save_pretrained(base)
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.save_pretrained(base)
    get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"])).save_pretrained(adapter)
    place = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": added} if name == "pad" else {"additional_special_tokens": [added]})
    tokenizer.chat_template = tokenizer.chat_template if templated else None
    tokenizer.save_pretrained(adapter)
    adapted = Target.from_pretrained(str(base), device="cpu", adapter=str(adapter))
    question = adapted.renderer.prompt([{"role": "user", "content": f"Use {added} now."}])
    pieces = target.renderer.prompt([{"role": "user", "content": f"Use {added} now."}])
    assert (question.count(place) == 1) == taken and (question == pieces) == (not taken)
    assert adapted.answer_text([place]) == (added if taken else "")
    assert adapted.tokenizer.chat_template == target.tokenizer.chat_template


def test_an_adapter_that_does_not_merge_into_weights_is_refused_in_a_sentence(tmp_path):
    from peft import PromptTuningConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    adapted.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be loaded and merged .* of a kind that merges into the weights, as"):
        Target.from_pretrained(TINY, device="cpu", adapter=str(tmp_path))


def test_a_tuned_temperature_is_its_own_drafters(target, tmp_path):
    make_head(target, "medusa", target_fingerprint=target.fingerprint()).save_pretrained(tmp_path / "head")
    (tmp_path / "tuned.json").write_text(json.dumps({"tree_temperature": 2.5, "max_nodes": 4}))
    builder = DrafterBuilder(target)
    words = [f"a=medusa:{tmp_path / 'head'}", f"b=medusa:{tmp_path / 'head'},tuned={tmp_path / 'tuned.json'}"]
    plain, tuned = (builder.build(DrafterSpec.parse(one)) for one in words)
    assert [drafter.head.config.tree_temperature for drafter in (plain, tuned)] == [1.0, 2.5]


def test_a_tuned_file_is_for_one_kind_one_head_and_one_target(target, tmp_path, caplog):
    """Files of an older version, which do not say for what they are, are taken; another device is told."""
    caplog.set_level("INFO", "draft_heads.inference")
    for seed, name in enumerate(("head", "other")):
        made = make_head(target, "medusa", seed=seed, target_fingerprint=target.fingerprint())
        made.save_pretrained(tmp_path / name)
    head, path = load_head(tmp_path / "head"), tmp_path / "tuned.json"
    values = {"tree_temperature": 2.5, "max_nodes": 4}
    write_tuned(path, values, "medusa", "runs/a/head", weights_hashes(head)["weights_hash"], target)
    written = json.loads(path.read_text())

    def build(name="head", kind="medusa", **changes):
        path.write_text(json.dumps({**values, "made_for": {**written["made_for"], **changes}}))
        return build_drafter(DrafterSpec.parse(f"a={kind}:{tmp_path / name},tuned={path}"), target)

    assert build().max_nodes == 4 and not caplog.messages
    with pytest.raises(ValueError, match=r"made for the same kind of drafter; .* was made for medusa; got ctc; tune"):
        build(kind="ctc")
    with pytest.raises(ValueError, match=r"same head or draft model; .* was made for runs/a/head; got .*/other, of"):
        build("other")
    with pytest.raises(ValueError, match=rf"same target; .* was made for DIR; got {TINY}, of other weights; tune"):
        build(target="DIR", target_weights_hash="0" * 16)
    assert build(device="a GPU").max_nodes == 4 and "was tuned on a GPU, this is" in caplog.messages.pop()
    path.write_text(json.dumps(values))
    old = build_drafter(DrafterSpec.parse(f"a=medusa:{tmp_path / 'head'},tuned={path}"), target)
    assert old.max_nodes == 4 and "does not say for which drafter and target" in caplog.messages.pop()


@pytest.mark.parametrize("temperature", ["0", "-1", "nan", "inf"])
def test_a_temperature_at_which_no_tree_can_be_built_is_refused_before_anything_is_loaded(tmp_path, temperature):
    (tmp_path / "tuned.json").write_text(json.dumps({"tree_temperature": float(temperature), "max_nodes": 4}))
    for words in (f"tree_temperature={temperature}", f"tuned={tmp_path / 'tuned.json'}"):
        with pytest.raises(ValueError, match=f"tree_temperature must be a number above 0; got {temperature}"):
            DrafterSpec.parse(f"mine=ctc:RUN/head,{words}")


ODD_FOLDERS = ("a,b", "a+b", "a:b", "a=b", "a,k=3", "ngram+c", "a+ngram", "x,y+z:w=1", "tree=raw,head")


@pytest.mark.parametrize("odd", ODD_FOLDERS)
def test_paths_that_exist_are_never_split(target, tmp_path, checkpoint, odd):
    """With and without a kind, options, and other parts; the same words mean the same where there is no such path."""
    head = tmp_path / odd
    shutil.copytree(checkpoint, head)
    tuned = tmp_path / f"{odd}.json"
    tuned.write_text('{"max_nodes": 7, "tree_temperature": 2.0}')
    for words, options in (("", {}), (",max_nodes=9", {"max_nodes": "9"}), (f",tuned={tuned}", {"tuned": str(tuned)})):
        for kind in ("", "ctc:"):
            spec = DrafterSpec.parse(f"mine={kind}{head}{words}")
            assert spec.parts == (DrafterPart("ctc", str(head), options),)
            several = DrafterSpec.parse(f"mine=ngram,n=3+{kind}{head}{words}+prompt_lookup")
            assert [part.kind for part in several.parts] == ["ngram", "ctc", "prompt_lookup"]
            assert several.parts[1] == spec.parts[0] and several.parts[0].options == {"n": "3"}
    assert build_drafter(DrafterSpec.parse(f"mine={head},max_nodes=9"), target).max_nodes == 9


def test_an_output_folder_named_like_a_drafter_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ngram,keep=1", "ngram+prompt_lookup", "h=ngram"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text("{}")
    assert DrafterSpec.parse("ngram,keep=1").parts == (DrafterPart("ngram", "", {"keep": "1"}),)
    assert [part.kind for part in DrafterSpec.parse("h=ngram+prompt_lookup").parts] == ["ngram", "prompt_lookup"]
    with pytest.raises(ValueError, match=r"got 'b' in 'mine=runs/a,b'; a path with , or \+ in it must exist"):
        DrafterSpec.parse("mine=runs/a,b")
    with pytest.raises(ValueError):
        DrafterSpec.parse("mine=" + "a/" * 5000 + ",b")
