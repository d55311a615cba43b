"""Heads that read several layers of the target: captured in the same forward, wherever the states come from."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from draft_heads.heads.base import Rows
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from tests.inference.models import make_head, make_prompts, vanilla_tokens

LAYERS = [1, 2, 3]
SETTINGS = GenerationSettings(24)


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("tests/tiny_target", torch.float64, "cpu")


@pytest.fixture(scope="module", params=[*sorted(HEADS), "ctc, label_context"])
def head(target, request):
    kind, _, option = request.param.partition(", ")
    return make_head(target, kind, target_layers=LAYERS, **({option: 4} if option else {}))


def hf_states(target, ids):
    """[L, k·H], `hidden_states` of transformers' own forward."""
    with torch.no_grad():
        states = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], dim=-1)


class Recorder(VanillaDrafter):
    """Keeps what it is shown of every committed token."""

    target_layers = tuple(LAYERS)

    def begin(self, slot, prompt, capacity):
        self.tokens, self.aux_hidden = [], []

    def observe(self, step, slot=None):
        count = int(step.count)
        self.tokens += step.tokens[0, :count].tolist()
        self.aux_hidden += step.aux_hidden[0, :count]


SMALL = {"vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MODELS = {
    "fused": lambda: MistralForCausalLM(MistralConfig(**SMALL, num_hidden_layers=4, num_key_value_heads=2)),
    "modules": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=211, n_embd=32, n_layer=4, n_head=4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_captured_layers_are_transformers_hidden_states(name):
    torch.manual_seed(0)
    model = Target(MODELS[name]().double())
    drafter = Recorder(model.device)
    DecodingEngine(model, drafter).generate([5, 9, 3, 7, 11] * 5, SETTINGS)
    expected = hf_states(model, drafter.tokens)
    assert torch.allclose(torch.stack(drafter.aux_hidden), expected, atol=1e-5 * float(expected.abs().max()))
    ids = torch.tensor([drafter.tokens])
    rows = model.forward_rows(ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], LAYERS)[1]
    (labelled,) = model.label([drafter.tokens], True, LAYERS)
    for states in (rows[0], labelled.aux_hidden):
        assert torch.allclose(states, expected, atol=1e-5 * float(expected.abs().max()))


def test_a_head_drafts_from_its_layers_as_it_was_trained(target, head):
    """The drafter's trees are those of a drafter that is given whole rows' states, as training has them, at once."""
    prompt = make_prompts(target, 1)[0]
    drafter, seen = drafter_for(head, target, 8), []
    propose = drafter.propose
    drafter.propose = lambda: (seen.append(propose()), seen[-1])[1]
    answer = DecodingEngine(target, drafter).generate(prompt, SETTINGS)
    assert answer.tokens == vanilla_tokens(target, prompt, SETTINGS)
    ids = torch.tensor([prompt + answer.tokens])
    text = Rows.of(torch.empty(0), ids)
    hidden, aux_hidden = target.forward_rows(ids, text.segment_ids, text.position_ids, LAYERS)
    anchors = (len(prompt) - 1 + torch.tensor([0, *answer.accept_lengths[1:]]).cumsum(0))[: len(seen)]

    def trees(aux_hidden):
        found = []
        for count in (anchors + 1).tolist():
            other = drafter_for(head, target, 8)
            other.begin(0, ids[0, :count], count)
            with torch.inference_mode():
                rows = ids[0, :count], hidden[0, :count], ids[0, count : count + 1], aux_hidden[0, :count]
                other.observe(VerifiedStep.of_prompt(*rows))
                found.append(other.propose())
        return found

    for drafted, expected in zip(seen, trees(aux_hidden)):
        assert torch.equal(drafted.tokens, expected.tokens) and torch.equal(drafted.parents, expected.parents)
        assert torch.allclose(drafted.log_probs, expected.log_probs, atol=1e-4)
    off_by_one = torch.cat([hidden, aux_hidden[..., : -hidden.shape[-1]]], dim=-1)
    others = [tree.log_probs for tree in trees(off_by_one)]
    assert not all(torch.allclose(tree.log_probs, other, atol=1e-2) for tree, other in zip(seen, others))


def test_batches_and_draft_models_pass_the_layers_on(target, head):
    prompts = make_prompts(target, 3)
    expected = [DecodingEngine(target, drafter_for(head, target, 8)).generate(prompt, SETTINGS) for prompt in prompts]
    together = BatchEngine(target, drafter_for(head, target, 8, slots=2)).generate(prompts, SETTINGS)
    assert [x.accept_lengths for x in together] == [x.accept_lengths for x in expected]
    cascade = DecodingEngine(target, DraftModelDrafter(target, drafter_for(head, target, 8), k=4))
    for prompt, answer in zip(prompts, expected):
        drafted = cascade.generate(prompt, SETTINGS)
        assert drafted.tokens == answer.tokens and max(drafted.accept_lengths) == 5  # the draft model is the target


@pytest.mark.parametrize("kind", [kind for kind in HEADS if not head_classes(kind)[1].usual_layers(4)])
def test_a_head_without_layers_starts_where_one_with_layers_does(target, kind):
    plain, layered = (make_head(target, kind, scale=0, target_layers=layers) for layers in ([], LAYERS))
    size = target.config.hidden_size
    hidden, aux_hidden = torch.randn(3, 5, size).double(), torch.randn(3, 5, 3 * size).double()
    assert torch.equal(plain.target_states(hidden, None), layered.target_states(hidden, aux_hidden))


def test_nothing_is_captured_for_heads_that_ask_for_nothing(target):
    ids = torch.tensor([[1, 2, 3]])
    assert target.forward_rows(ids, torch.ones_like(ids), torch.arange(3)[None])[1] is None
    assert target.prefill(ids[0], target.new_cache(40)).aux_hidden is None


@pytest.mark.parametrize("layers", [[0, 1, 2], [3, 2, 1], [1, 1], [1, 4]])
def test_layers_that_cannot_be_read_are_refused(target, layers):
    with pytest.raises(ValueError, match="ascending numbers from 1 to 3"):
        target.check_layers(layers)


def test_parts_of_a_hybrid_are_shown_their_own_layers(target):
    heads = [make_head(target, "medusa", target_layers=layers) for layers in ([1, 3], [2])]
    parts = [(f"medusa_{i}", drafter_for(head, target, 8)) for i, head in enumerate(heads)]
    hybrid = HybridDrafter([*parts, ("ngram", NgramDrafter())], target, 8)
    assert hybrid.target_layers == (1, 2, 3)
    prompt = make_prompts(target, 1)[0]
    answer = DecodingEngine(target, hybrid).generate(prompt, SETTINGS)
    assert answer.tokens == vanilla_tokens(target, prompt, SETTINGS)
    text = Rows.of(torch.empty(0), torch.tensor([prompt + answer.tokens]))
    anchor = len(prompt) + sum(answer.accept_lengths[:-1]) - 2
    for head, (_, drafter) in zip(heads, parts):
        states = target.forward_rows(text.input_ids, text.segment_ids, text.position_ids, head.config.target_layers)
        expected = head.target_states(*(x[0, anchor] for x in states))
        assert torch.allclose(drafter.state[0], expected, atol=1e-4)
