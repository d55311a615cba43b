"""The plugin with a stand-in for vLLM: what it reads of a step, what it wraps, and what it refuses."""

import importlib
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from draft_heads.heads.checkpoint import load_head
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.serving.request_drafter import ReadTokens
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from tests.inference.models import make_head
from tests.tiny_chat import byte_tokenizer, random_llama, template


def make_runner_class():
    class GPUModelRunner:
        use_aux_hidden_state_outputs = False

        def propose_draft_token_ids(
            self, scheduler_output, sampled, hidden_states, aux_hidden_states, common_attn_metadata
        ):
            batch = self.input_batch
            return self.drafter.propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings=None)

        def _input_fits_in_drafter(self, common_attn_metadata):
            return False

        def _setup_eagle3_aux_hidden_state_outputs(self):
            self.set_up = "vLLM's own"

        def get_model(self):
            return self.model

    return GPUModelRunner


class Log:
    def __init__(self):
        self.lines = []

    def info(self, line, *values):
        self.lines.append(line % values)

    warning = info


@pytest.fixture
def vllm(monkeypatch):
    """Modules of the names that the plugin imports; the log is `vllm.log`."""
    log = Log()
    contents = {
        "vllm": {"__version__": "0.32.0", "log": log},
        "vllm.logger": {"init_logger": lambda name: log},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": make_runner_class()},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members, __spec__=SimpleNamespace(name=name))
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["vllm"]


@pytest.fixture
def plugin(vllm, monkeypatch):
    from draft_heads.inference.serving import vllm as module

    importlib.reload(module)
    return module


def runner_class():
    return sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner


def config(**changes):
    options = {"head": "RUN/head", "parallel": {}, "model": "TARGET", "limit": 64, "context": None} | changes
    parallel = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1} | options["parallel"]
    own = {"draft_head": options["head"]} | ({"draft_context": options["context"]} if options["context"] else {})
    return SimpleNamespace(
        additional_config=own | options.get("more", {}),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(model=options["model"], dtype=torch.float32, max_model_len=options["limit"]),
        speculative_config=SimpleNamespace(num_speculative_tokens=3, **options.get("speculative", {})),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )


def served(target, quantised=False):
    """What vLLM holds of a target: rows behind the vocabulary, and how the LM head is kept."""
    embedding, lm_head = nn.Embedding(320, target.model.config.hidden_size), nn.Linear(1, 1)
    with torch.no_grad():
        embedding.weight[:300] = target.embedding.weight
        padded = torch.cat([target.lm_head.weight, torch.full((20, embedding.embedding_dim), 9.0)])
    lm_head.weight = nn.Parameter(padded, requires_grad=False)
    kind = "Fp8Method" if quantised else "UnquantizedEmbeddingMethod"
    lm_head.quant_method = type(kind, (), {})()
    model = nn.Module()
    model.model, model.lm_head = nn.Module(), lm_head
    model.model.embed_tokens = embedding
    return model


def head_of(target, kind):
    return make_head(target, kind, scale=0.3, **({"target_layers": [1]} if kind == "eagle3" else {}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target's folder and that of a head for it."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = random_llama(), byte_tokenizer(template("chatml"))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    target = Target.from_pretrained(str(folder / "target"))
    heads = {}
    for kind in ("ctc", "eagle3"):
        head = head_of(target, kind)
        head.config = replace(head.config, target_fingerprint=target.fingerprint())
        head.save_pretrained(folder / kind)
        heads[kind] = str(folder / kind)
    return target, str(folder / "target"), heads


LACKING = ["accelerate", "datasets", "deepspeed", "matplotlib", "peft", "tensorboard", "vllm", "xxhash"]
"""Packages that the environment of vLLM lacks, or that the plugin must not need to be imported."""


def without_them(program):
    """What a program prints where these packages are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({LACKING})); {program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_can_be_imported_without_vllm_and_without_what_its_environment_lacks():
    program = "from draft_heads.inference.serving import vllm; print(vllm.TRIED)"
    assert without_them(program) == "0.32\n"


def test_heads_are_loaded_and_draft_without_what_its_environment_lacks():
    test = f"{__file__}::test_a_step_is_cut_into_what_each_request_keeps"
    program = f"import pytest; sys.exit(pytest.main([{test!r}, '-p', 'no:cacheprovider', '-p', 'no:xdist']))"
    assert "1 passed" in without_them(program)


def test_a_step_is_cut_into_what_each_request_keeps(plugin, folders):
    """Two accepted drafts of three, a piece of a prompt, a whole prompt; rows after the vocabulary are not drafted."""
    target, name, heads = folders
    proposer = plugin.HeadProposer(config(model=name, head=heads["ctc"]))
    model = served(target)
    proposer.load_model(model)
    seen = []
    draft = proposer.drafts.draft

    def watched(requests, hidden, aux_hidden):
        seen.append((requests, aux_hidden))
        return draft(requests, hidden, aux_hidden)

    proposer.drafts.draft = watched
    runner = runner_class()()
    runner.drafter, runner.requests = proposer, {"a": 0, "b": 0, "c": 0}
    tokens = np.arange(5, 5 + 3 * 64).reshape(3, 64) % 290
    runner.input_batch = SimpleNamespace(
        req_ids=["a", "b", "c"],
        num_computed_tokens_cpu=np.array([10, 0, 0]),
        num_tokens_no_spec=np.array([14, 20, 61]),
        token_ids_cpu=tokens,
    )
    metadata = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 4, 12, 72]))
    hidden = torch.randn(72, target.model.config.hidden_size)
    drafts = runner.propose_draft_token_ids(None, [[1, 2, 3], [], [4]], hidden, None, metadata)
    rows = lambda index, start, end: tokens[index, start : end + 1].tolist()  # noqa: E731
    assert seen[0] == (
        [
            ReadTokens("a", 10, rows(0, 10, 13), 0, True),
            ReadTokens("b", 0, rows(1, 0, 8), 4, False),
            ReadTokens("c", 0, rows(2, 0, 60), 12, True),
        ],
        None,
    )
    assert len(drafts[0]) == 3 and drafts[1] == [] and len(drafts[2]) == 2  # c's third would be its 65th token
    assert max(map(max, (drafts[0], drafts[2]))) < 300
    assert any("begins after the first 10 tokens of a request" in line for line in sys.modules["vllm"].log.lines)
    runner.requests = {"c": 0}
    runner.input_batch.req_ids, runner.input_batch.num_computed_tokens_cpu = ["c"], np.array([60])
    runner.input_batch.num_tokens_no_spec, runner.input_batch.token_ids_cpu = np.array([62]), tokens[2:]
    metadata = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 1]))
    runner.propose_draft_token_ids(None, [[4]], hidden[:1], None, common_attn_metadata=metadata)
    assert len(proposer.drafts) == 1


def test_the_drafts_are_those_of_the_target_itself(plugin, folders):
    target, name, heads = folders
    proposer = plugin.HeadProposer(config(model=name, head=heads["eagle3"]))
    proposer.load_model(served(target))
    ids = torch.arange(7, 27)[None]
    layers = proposer.layers
    hidden, aux = target.forward_rows(ids, torch.ones_like(ids), torch.arange(20)[None], layers)
    pieces = list(aux[0].chunk(len(layers), dim=-1))
    runner = SimpleNamespace(
        requests={"a": 0}, input_batch=SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=np.array([0]))
    )
    proposer.take_step(runner, None, hidden[0], pieces, SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 20])))
    found = proposer.propose([[99]], np.array([21]), np.array([[*ids[0].tolist(), 99, 0]]))
    own = drafter_for(head_of(target, "eagle3"), target, 3, tree="chain")
    own.begin(0, ids[0], 64)
    own.observe(VerifiedStep.of_prompt(ids[0], hidden[0], torch.tensor([99]), aux[0]), 0)
    assert found == own.propose().tokens.tolist()


@pytest.mark.parametrize("by_batch", [None, [[1, 2, 3], [3, 64, 0]]])
def test_fewer_tokens_are_drafted_where_vllm_schedules_fewer_for_a_large_batch(plugin, folders, by_batch):
    """vLLM's own number of a step counts where a schedule was asked for; the head reads the steps without drafts."""
    target, name, heads = folders
    speculative = {"num_speculative_tokens_per_batch_size": by_batch}
    proposer = plugin.HeadProposer(config(model=name, head=heads["ctc"], speculative=speculative))
    proposer.load_model(served(target))
    runner = runner_class()()
    runner.drafter, runner.requests = proposer, {"a": 0}
    batch = runner.input_batch = SimpleNamespace(req_ids=["a"], token_ids_cpu=np.arange(5, 69)[None])
    found = []
    for place, scheduled in enumerate((1, 0, 2), start=20):
        batch.num_computed_tokens_cpu, batch.num_tokens_no_spec = np.array([place]), np.array([place + 2])
        metadata = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 1]))
        hidden = torch.randn(1, target.model.config.hidden_size)
        step = SimpleNamespace(num_spec_tokens_to_schedule=scheduled)
        found.append(len(runner.propose_draft_token_ids(step, [[7]], hidden, None, metadata)[0]))
        assert [text.seen for text in proposer.drafts._texts.values()] == [place + 1]
    assert found == ([1, 0, 2] if by_batch else [3, 3, 3])


def test_the_runner_gives_layers_and_every_step_to_a_head_and_is_itself_for_others(plugin, folders):
    target, name, heads = folders
    runner = runner_class()()
    runner.drafter, runner.model = object(), SimpleNamespace()
    runner._setup_eagle3_aux_hidden_state_outputs()
    assert runner.set_up == "vLLM's own" and not runner._input_fits_in_drafter(1)
    runner.drafter = plugin.HeadProposer(config(model=name, head=heads["eagle3"]))
    runner.drafter.load_model(served(target))
    with pytest.raises(ValueError, match=r"reads layers \[.*vLLM gives no layers' outputs of SimpleNamespace; serve"):
        runner._setup_eagle3_aux_hidden_state_outputs()
    asked = []
    runner.model.set_aux_hidden_state_layers = asked.append
    runner._setup_eagle3_aux_hidden_state_outputs()
    assert asked == [runner.drafter.layers] and runner.use_aux_hidden_state_outputs
    assert runner._input_fits_in_drafter(1) and not runner._input_fits_in_drafter(None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head": ""}, r"needs the folder or hub id of a head; additional_config has draft_head=''; pass --additional"),
        ({"parallel": {"pipeline_parallel_size": 2}}, r"got pipeline_parallel_size 2; set it to 1"),
        ({"context": -3}, r"draft_context .*-3"),
        ({"context": 7}, r"draft_context must be at least 8; got 7; leave it out for max_model_len"),
        ({"more": {"draft_layers": [1]}}, r"draft_head and draft_context for HeadProposer; got draft_layers; rename"),
        ({"more": {"draft_contxt": 64}}, r"draft_head and draft_context for HeadProposer; got draft_contxt; rename"),
    ],
)
def test_a_configuration_that_no_head_drafts_in_is_refused(plugin, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        plugin.HeadProposer(config(**changes))


def test_another_target_a_quantised_lm_head_and_another_vllm_are_refused(plugin, folders, monkeypatch, tmp_path, vllm):
    target, name, heads = folders
    proposer = plugin.HeadProposer(config(model=name, head=heads["ctc"]))
    with pytest.raises(ValueError, match=r"LM head, which must not be quantised; .* has one of Fp8Method; serve"):
        proposer.load_model(served(target, quantised=True))
    other = random_llama(hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    other.save_pretrained(tmp_path)
    byte_tokenizer(template("chatml")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="belongs to another target: hidden_size"):
        plugin.HeadProposer(config(model=str(tmp_path), head=heads["ctc"])).load_model(served(target))
    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    plugin.HeadProposer(config())
    assert vllm.log.lines[-1] == "HeadProposer was tried with vLLM 0.32; this is 0.40.1"
    monkeypatch.delattr(runner_class(), "_input_fits_in_drafter")
    with pytest.raises(
        ValueError, match=r"reads common_attn_metadata of vLLM's _input_fits_in_drafter; vLLM 0.40.1 has"
    ):
        plugin.HeadProposer(config())


def test_a_head_that_learned_from_another_chat_template_is_loaded_and_it_is_told(plugin, folders, tmp_path, vllm):
    """vLLM renders the prompts; a base model's tokenizer may have no template at all."""
    target, name, heads = folders
    head = load_head(heads["ctc"])
    for folder, template_hash, told in (
        ("a", "another", 1),
        ("b", None, 1),
        ("c", target.fingerprint()["chat_template_hash"], 0),
    ):
        made_for = {**target.fingerprint(), "chat_template_hash": template_hash}
        head.config = replace(head.config, target_fingerprint=made_for)
        head.save_pretrained(tmp_path / folder)
        vllm.log.lines.clear()
        plugin.HeadProposer(config(model=name, head=str(tmp_path / folder))).load_model(served(target))
        assert sum("learned from another chat template" in line for line in vllm.log.lines) == told


def test_a_head_of_a_target_whose_weights_are_kept_in_parts_reads_its_files(plugin, folders):
    """Of several processes each has a part of the LM head."""
    target, name, heads = folders
    proposer = plugin.HeadProposer(config(model=name, head=heads["ctc"], parallel={"tensor_parallel_size": 2}))
    model = served(target)
    model.lm_head.weight.data = model.lm_head.weight.data[:160]
    proposer.load_model(model)
    assert torch.equal(proposer._view(model, target, torch.device("cpu")).lm_head_weight, target.lm_head.weight)
