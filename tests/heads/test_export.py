"""Exports against a second reading of each format, by the rules of the engines' loaders; and back again."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from draft_heads.heads.base import Rows
from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.chimera import ChimeraConfig, ChimeraHead
from draft_heads.heads.ctc import CTCConfig, CTCHead
from draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from draft_heads.heads.export.formats import FORMATS, differences, read_folder, write_folder
from draft_heads.heads.hydra import HydraConfig, HydraHead
from draft_heads.heads.medusa import MedusaConfig, MedusaHead
from draft_heads.inference.target.target import Target
from tests.heads.small import disturbed, lent_target
from tests.inference.models import make_head
from tests.running import run_script

TARGET = SimpleNamespace(max_position_embeddings=128, architectures=["LlamaForCausalLM"])


def eagle3(**settings):
    head = disturbed(Eagle3Head, Eagle3Config, target_layers=[2, 5, 9], **settings)
    if head.draft_vocab is not None:
        head.set_draft_vocab(torch.arange(40) * 3 // 2)
    return head.eval()


def medusa(**settings):
    return disturbed(MedusaHead, MedusaConfig, heads=3, layers=2, **settings).eval()


WRITTEN = {
    "vllm-medusa": medusa,
    "vllm-medusa cut": lambda: medusa(draft_vocab_size=40),
    "tgi-medusa": medusa,
    "tgi-medusa cut": lambda: medusa(draft_vocab_size=40),
    "eagle3": eagle3,
    "eagle3 cut": lambda: eagle3(draft_vocab_size=40),
    "speculators": eagle3,
    "speculators cut": lambda: eagle3(draft_vocab_size=40),
}


@pytest.fixture(params=WRITTEN)
def written(request, tmp_path):
    name, head = request.param.split()[0], WRITTEN[request.param]()
    write_folder(head, name, tmp_path / "out", TARGET, "some/target")
    return name, head, tmp_path / "out"


def test_what_is_read_back_is_the_head(written):
    name, head, folder = written
    back = read_folder(folder)
    assert differences(head, back, name) == [] and FORMATS[name].kind == back.config.kind
    with torch.no_grad():
        next(iter(back.parameters()))[0] += 1
    assert len(differences(head, back, name)) == 2 and differences(head, back, name)[1] == "log-probabilities"


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_engines_run_the_head_in_the_targets_type(tmp_path, dtype):
    target = SimpleNamespace(**{**vars(TARGET), "dtype": dtype})
    write_folder(eagle3(), "eagle3", tmp_path / "out", target, "some/target")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config["dtype"], config["torch_dtype"]} == {"bfloat16" if dtype else "float32"}


def vllm_medusa_logits(folder, hidden):
    """As vLLM's loader and forward have it: sizes from config.json, defaults where it names none."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    logits = []
    for k in range(config["num_heads"]):
        state = hidden
        for layer in range(config["num_hidden_layers"]):
            bias = tensors[f"blocks.{k}.layers.{layer}.bias"] if config.get("medusa_fc_bias", False) else None
            state = state + F.silu(F.linear(state, tensors[f"blocks.{k}.layers.{layer}.weight"], bias))
        assert len(tensors[f"lm_heads.{k}.weight"]) == config["vocab_size"] == config["truncated_vocab_size"]
        logits.append(state @ tensors[f"lm_heads.{k}.weight"].T)
    return torch.stack(logits, dim=-2)


@pytest.mark.parametrize("cut", [0, 40])
def test_vllms_medusa_computes_the_heads_logits(tmp_path, cut):
    head, hidden = medusa(draft_vocab_size=cut), torch.randn(5, 32)
    write_folder(head, "vllm-medusa", tmp_path / "out", TARGET, "t")
    logits = vllm_medusa_logits(tmp_path / "out", hidden)
    tokens = torch.arange(61) if head.draft_vocab is None else head.draft_vocab
    ours = head.draft_log_probs(hidden)
    assert torch.allclose(logits[..., tokens].log_softmax(-1), ours, atol=1e-5)
    assert torch.equal(logits.argmax(-1), tokens[ours.argmax(-1)])  # tokens out of the vocabulary are never drafted


@pytest.mark.parametrize("cut", [0, 40])
def test_tgis_medusa_computes_the_heads_logits(tmp_path, cut):
    head, hidden = medusa(draft_vocab_size=cut), torch.randn(5, 32)
    write_folder(head, "tgi-medusa", tmp_path / "out", TARGET, "t")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert "architectures" not in config and config["base_model_name_or_path"] == "t"
    for k in range(config["medusa_num_heads"]):
        state = hidden
        for layer in range(config["medusa_num_layers"]):
            name = f"{k}.{layer}.linear"
            state = state + F.silu(F.linear(state, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        logits = F.linear(state, tensors[f"{k}.{config['medusa_num_layers']}.weight"])
        tokens = torch.arange(61) if head.draft_vocab is None else head.draft_vocab
        ours = head.draft_log_probs(hidden)[:, k]
        assert logits.shape[-1] == 61 and torch.equal(logits.argmax(-1), tokens[ours.argmax(-1)])
        assert torch.allclose(logits[:, tokens].log_softmax(-1), ours, atol=1e-5)


def engine_chain(folder, prefix, embed, aux_hidden, ids, passes):
    """Logits [passes, DV] of a top-1 engine at the last position: by its names of tensors, with nothing of ours."""
    config, t = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = config.get("transformer_layer_config", config)
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    theta, eps = config["rope_parameters"]["rope_theta"], config["rms_norm_eps"]
    assert config["rope_theta"] == theta  # read by engines on transformers 4

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * t[f"{name}.weight"]

    def rotated(x, position):
        angles = position * theta ** (-torch.arange(0, size, 2) / size)
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    keys, values, out = [], [], []

    def step(token, state, position):
        read = torch.cat([norm(embed(token), f"{prefix}.input_layernorm"), norm(state, f"{prefix}.hidden_norm")])
        query, key, value = (
            (t[f"{prefix}.self_attn.{name}_proj.weight"] @ read).view(-1, size) for name in ("q", "k", "v")
        )
        keys.append(rotated(key, position))
        values.append(value)
        grouped = (torch.stack(x).repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
        all_keys, all_values = grouped
        weights = torch.einsum("hd,chd->hc", rotated(query, position), all_keys).div(size**0.5).softmax(-1)
        attended = torch.einsum("hc,chd->hd", weights, all_values).flatten()
        state = state + t[f"{prefix}.self_attn.o_proj.weight"] @ attended
        inner = norm(state, f"{prefix}.post_attention_layernorm")
        gate, up = (t[f"{prefix}.mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        return state + t[f"{prefix}.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    fused = aux_hidden @ t["fc.weight"].T
    for position in range(len(ids) - 1):
        state = step(ids[position + 1], fused[position], position)
    for k in range(passes):
        logits = t["lm_head.weight"] @ norm(state, "norm")
        out.append(logits)
        drafted = int(logits.argmax())
        token = drafted + int(t["d2t"][drafted]) if "d2t" in t else drafted
        state = step(torch.tensor(token), state, len(ids) - 1 + k)
    return torch.stack(out), t


@pytest.mark.parametrize("cut", [0, 40])
@pytest.mark.parametrize(("name", "prefix"), [("eagle3", "midlayer"), ("speculators", "layers.0")])
@torch.no_grad()
def test_engines_eagle3_computes_the_heads_chain(tmp_path, name, prefix, cut):
    head, view = eagle3(draft_vocab_size=cut), lent_target()
    write_folder(head, name, tmp_path / "out", TARGET, "t")
    torch.manual_seed(2)
    ids, aux_hidden = torch.randint(1, 61, (9,)), torch.randn(9, 96)
    logits, tensors = engine_chain(tmp_path / "out", prefix, view.embed, aux_hidden, ids, passes=4)
    text = ids
    for k in range(4):
        rows = Rows(
            *(torch.zeros(1, len(text), 32), text[None], torch.ones(1, len(text), dtype=torch.long)),
            torch.arange(len(text))[None],
            torch.cat([aux_hidden, torch.zeros(len(text) - 9, 96)])[None],
        )
        states = head.train_states(rows, torch.tensor([[7]]), view)[0, 0, k]
        ours = head.next_log_probs(states)
        assert torch.allclose(logits[k].log_softmax(-1), ours, atol=1e-4)
        text = torch.cat([text, head.draft_tokens(ours.argmax())[None]])
    assert ("d2t" in tensors) == ("t2d" in tensors) == bool(cut)  # vLLM refuses them without a draft vocabulary
    assert not cut or (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert not cut or tensors["t2d"].nonzero()[:, 0].tolist() == (torch.arange(40) + tensors["d2t"]).tolist()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 9]
    if name == "eagle3":
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 8]
    else:
        assert config["norm_before_residual"] is False and config["target_hidden_size"] is None


@pytest.mark.parametrize(
    ("head", "name", "told"),
    [
        (lambda: disturbed(CTCHead, CTCConfig), "eagle3", "scripts/serve.py, .*no other engine knows its kind"),
        (lambda: disturbed(ChimeraHead, ChimeraConfig), "vllm-medusa", "no other engine knows its kind"),
        (lambda: disturbed(HydraHead, HydraConfig), "tgi-medusa", "no other engine knows its kind"),
        (medusa, "eagle3", "use --format vllm-medusa or tgi-medusa"),
        (lambda: medusa(target_layers=[1]), "vllm-medusa", "--target_layers 1; train one without"),
        (lambda: disturbed(Eagle3Head, Eagle3Config), "eagle3", "the last hidden state; train it with"),
    ],
)
def test_what_an_engine_would_misread_is_refused(tmp_path, head, name, told):
    with pytest.raises(ValueError, match=told):
        write_folder(head(), name, tmp_path / "out", TARGET, "t")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("passes", [1, 3, 9])
def test_heads_of_any_number_of_passes_are_the_same_when_read_back(tmp_path, passes):
    head = eagle3(draft_vocab_size=40, passes=passes)
    write_folder(head, "eagle3", tmp_path, TARGET, "t")
    assert differences(head, read_folder(tmp_path), "eagle3") == []


def test_public_heads_in_other_forms_are_read(tmp_path):
    head = medusa()
    write_folder(head, "tgi-medusa", tmp_path / "a", TARGET, "t")
    tensors = load_file(tmp_path / "a" / "medusa_lm_head.safetensors")
    (tmp_path / "a" / "medusa_lm_head.safetensors").unlink()
    (tmp_path / "a" / "medusa_lm_head.pt").touch()
    with pytest.raises(
        ValueError, match=r"a pickle can run code; got .*medusa_lm_head.pt; convert it once to .*/a/med"
    ):
        read_folder(tmp_path / "a")
    prefixed = {f"medusa_head.{name}": x for name, x in tensors.items()}
    save_file(prefixed, tmp_path / "a" / "medusa_lm_head.safetensors")
    assert differences(head, read_folder(tmp_path / "a"), "tgi-medusa") == []
    with pytest.raises(ValueError, match=r"--target_layers is for EAGLE-3 heads .* tgi-medusa"):
        read_folder(tmp_path / "a", target_layers=[2, 5, 9])
    save_file({**prefixed, "lm_head.weight": torch.ones(2)}, tmp_path / "a" / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"named by its number .*; got lm_head.weight"):
        read_folder(tmp_path / "a")
    (tmp_path / "a" / "medusa_lm_head.safetensors").rename(tmp_path / "a" / "x.safetensors")
    save_file(tensors, tmp_path / "a" / "y.safetensors")
    with pytest.raises(ValueError, match=r"has its tensors in medusa_lm_head.*/a has x.safetensors, y.safetensors"):
        read_folder(tmp_path / "a")

    head = eagle3(draft_vocab_size=40)
    write_folder(head, "eagle3", tmp_path / "b", TARGET, "t")
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(config))
    assert read_folder(tmp_path / "b").config.target_layers == [2, 5, 9]  # SGLang's counting
    assert read_folder(tmp_path / "b", target_layers=[1, 5, 9]).config.target_layers == [1, 5, 9]
    del config["eagle_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a guess wrong by one is silent; give them as --target_layers"):
        read_folder(tmp_path / "b")
    assert read_folder(tmp_path / "b", target_layers=[2, 5, 9]).config.target_layers == [2, 5, 9]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda config, tensors: config.update(model_type="bert", architectures=[]), "none of the .* or pass --format"),
        (lambda config, tensors: tensors.pop("fc.weight"), "fc.weight missing or unexpected"),
        (lambda config, tensors: tensors.pop("d2t"), "needs d2t"),
        (lambda config, tensors: tensors["d2t"].add_(1000), "draft vocabulary"),
        (lambda config, tensors: config["rope_parameters"].update(rope_type="llama3"), "type llama3"),
    ],
)
def test_folders_that_cannot_be_read_are_refused(tmp_path, change, told):
    write_folder(eagle3(draft_vocab_size=40), "eagle3", tmp_path, TARGET, "t")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=told):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("vllm-medusa", lambda config: config.pop("num_heads"), "as vllm-medusa must have .num_heads"),
        ("vllm-medusa", lambda config: config.update(num_hidden_layers=1), " 1 layers and .* has no blocks.0"),
        ("vllm-medusa", lambda config: config.update(num_heads="x"), "out as vllm-medusa cannot be used"),
        ("tgi-medusa", lambda config: config.update(medusa_num_layers=5), "as tgi-medusa .*needs a tensor 0.5.weight"),
        ("eagle3", lambda config: config.update(hidden_size=48), "out as eagle3 cannot be used: .*, config.json says"),
        ("eagle3", lambda config: config.pop("intermediate_size"), "must have 'intermediate_size'"),
    ],
)  # fmt: skip
def test_damaged_settings_get_sentences_that_name_the_folder(tmp_path, name, damage, told):
    write_folder(eagle3() if name == "eagle3" else medusa(), name, tmp_path / "out", TARGET, "t")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    damage(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"(?s){told}"):
        read_folder(tmp_path / "out")


def test_damaged_files_get_sentences_that_name_them(tmp_path):
    write_folder(medusa(), "vllm-medusa", tmp_path, TARGET, "t")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read: .*copy it again"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type":')
    with pytest.raises(ValueError, match=r"config.json is damaged .*copy the checkpoint again"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("eagle3", {"rms_norm_eps": 0.5}, ["rms_norm_eps", "log-probabilities"]),
        ("eagle3", {"rope_parameters": {"rope_theta": 50.0}, "rope_theta": 50.0}, ["rope_theta", "log-probabilities"]),
        ("eagle3", {"vocab_size": 62}, "61 of 62 tokens needs d2t"),
        ("eagle3", {"draft_vocab_size": 60}, "draft_vocab_size 60 must be the rows of lm_head.weight, 61"),
        ("speculators", {"draft_vocab_size": 60}, "draft_vocab_size 60 must be the rows of lm_head.weight, 61"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, r"\[1, 4, 8\], and \[2, 5, 9\] in eagle_config"),
        ("eagle3", {"hidden_act": "gelu"}, "hidden_act must be 'silu'; got 'gelu'"),
        ("eagle3", {"logit_scale": 0.5}, "logit_scale must be 1.0; got 0.5"),
        ("eagle3", {"norm_before_residual": True}, "norm_before_residual must be False; got True"),
        ("speculators", {"norm_before_residual": True}, "norm_before_residual must be False; got True"),
        ("eagle3", {"norm_output": True}, "norm_output must be False; got True"),
        ("speculators", {"norm_output": True}, "norm_output must be False; got True"),
        ("eagle3", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rotary positions are of type linear"),
        ("vllm-medusa", {"medusa_fc_bias": False}, "medusa_fc_bias false has no blocks.0.layers.0.bias"),
        ("tgi-medusa", {"medusa_fc_bias": False}, "medusa_fc_bias false has no 0.0.linear.bias"),
        ("vllm-medusa", {"logit_scale": 0.5}, ["heads.0.vocabulary.weight", "log-probabilities"]),
        ("vllm-medusa", {"truncated_vocab_size": 40}, "truncated_vocab_size 40 must be .* 61"),
        ("vllm-medusa", {"hidden_size": 48}, "is \\(32, 32\\), config.json says \\(48, 48\\)"),
        ("tgi-medusa", {"vocab_size": 62}, "is \\(61, 32\\), config.json says \\(62, 32\\)"),
    ],
)  # fmt: skip
def test_a_setting_that_an_engine_would_read_otherwise_is_found(tmp_path, name, wrong, told):
    head = medusa() if name.endswith("medusa") else eagle3()
    write_folder(head, name, tmp_path, TARGET, "t")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    if isinstance(told, list):
        found = differences(head, read_folder(tmp_path), name)
        assert (found[0], found[-1]) == tuple(told)
    else:
        with pytest.raises(ValueError, match=f"(?s){told}"):
            read_folder(tmp_path)


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("tests/tiny_target", device="cpu")


def test_the_script_says_what_it_compared(tmp_path, target):
    head = make_head(target, "medusa", target_fingerprint=target.fingerprint())
    head.config.target = "tests/tiny_target"
    head.save_pretrained(tmp_path / "head")
    flags = "--head", str(tmp_path / "head"), "--format", "vllm-medusa", "--check", "--output", str(tmp_path / "out")
    status, told = run_script("scripts/export.py", *flags)
    assert status == 0 and f"found equal: {len(head.state_dict())} tensors, heads, layers, hidden_size, " in told
    assert "the log-probabilities of drafts from random states" in told
    status, told = run_script("scripts/export.py", *flags[:-1], str(tmp_path / "b"), "--target", "data/tiny_target")
    assert status == 1 and "data/tiny_target has other sizes: " in told and "num_hidden_layers" in told
    assert not (tmp_path / "b").exists()


def test_what_a_config_states_for_the_whole_model_only_is_exported(tmp_path, target):
    """As multimodal checkpoints do, whose text part has neither a type nor the name of a class."""
    text = LlamaConfig(vocab_size=61, hidden_size=32, num_attention_heads=4, num_hidden_layers=12)
    stated = {"dtype": "bfloat16", "architectures": ["LlavaForConditionalGeneration"]}
    whole = LlavaConfig(vision_config=CLIPVisionConfig(), text_config=text, **stated)
    whole.save_pretrained(tmp_path / "target")
    head = eagle3()
    head.config.target = str(tmp_path / "target")
    head.save_pretrained(tmp_path / "head", {"options": {"target_adapter": "runs/lora"}})
    flags = "--head", str(tmp_path / "head"), "--format", "speculators", "--output", str(tmp_path / "out")
    status, told = run_script("scripts/export.py", *flags)
    assert status == 0 and "the adapter runs/lora merged" in told
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transformer_layer_config"]["dtype"] == "bfloat16"
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlavaForConditionalGeneration"]


def test_an_eagle3_head_with_embeddings_of_its_own_is_not_imported(tmp_path, target):
    write_folder(make_head(target, "eagle3", target_layers=[1, 2, 3]), "eagle3", tmp_path / "in", TARGET, "t")
    weights = tmp_path / "in" / "model.safetensors"
    own = target.embedding.weight.detach().to(torch.bfloat16)
    flags = "--head", str(tmp_path / "in"), "--target", "tests/tiny_target", "--output"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    save_file({**tensors, "embed_tokens.weight": own}, weights)
    status, told = run_script("scripts/import_head.py", *flags, str(tmp_path / "out"))
    assert status == 0, told
    other = {**target.fingerprint(), "chat_template_hash": "of the template that it was trained with"}
    assert other.items() > load_head(tmp_path / "out", other).config.target_fingerprint.items()
    save_file({**tensors, "embed_tokens.weight": own + 1}, weights)
    status, told = run_script("scripts/import_head.py", *flags, str(tmp_path / "out 2"))
    assert status == 1 and "embed_tokens.weight of" in told and not (tmp_path / "out 2").exists()
