"""Eight-bit weights draft what the head's own weights draft, but for their rounding."""

from dataclasses import replace

import pytest
import torch

from draft_heads.inference.drafters.heads.medusa import MedusaDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.int8_weights import DraftingHead, Int8Linear, Int8View, in_eight_bits
from draft_heads.inference.native import library
from draft_heads.inference.target.compiled import program
from tests.inference.models import load_target, make_head, make_prompts, vanilla_tokens


@pytest.fixture(scope="module", autouse=True)
def loaded():
    assert library.load(), "the tests need a C++ compiler"


def test_a_product_is_as_exact_as_the_rounding():
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 50)[:, None]
    bias = torch.randn(50)
    rows = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1))
    found = Int8Linear(weight, bias)(rows)
    exact = rows @ weight.T + bias
    off = weight.abs().amax(-1) / 127 / 2 * rows.abs().sum(-1, keepdim=True)  # each weight by half a step at most
    assert found.shape == exact.shape and ((found - exact).abs() <= off * 1.01 + 1e-6).all()


def test_a_row_of_zeros_stays_one():
    assert Int8Linear(torch.zeros(2, 4))(torch.ones(1, 4)).tolist() == [[0, 0]]


def test_only_float32_is_rounded():
    llama = load_target("llama", torch.float32)
    drafting = DraftingHead(make_head(llama, "ctc").bfloat16(), 1, llama.decoding_view())
    drafting.prepare()
    assert drafting._rounded is None


def block_output(block, states):
    positions = torch.arange(states.shape[1])[None]

    def attend(queries, keys, values):
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

    return block(states, positions, attend)


def test_a_block_in_eight_bits_does_nearly_what_it_does_and_shares_the_rest():
    llama = load_target("llama", torch.float32)
    head = make_head(llama, "ctc")
    rounded = in_eight_bits(head)
    assert rounded.frame_queries is head.frame_queries and rounded.blocks[0].mlp_norm is head.blocks[0].mlp_norm
    states = torch.randn(1, 5, llama.config.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        for ours, theirs in (
            (block_output(rounded.blocks[0], states), block_output(head.blocks[0], states)),
            *zip(*(h.blocks[0].context_keys_values(states, torch.arange(5)[None]) for h in (rounded, head))),
        ):
            assert (ours - theirs).abs().max() < 0.05 * theirs.std()


def test_a_view_in_eight_bits_says_nearly_what_the_lm_head_says():
    view = load_target("llama", torch.float32).decoding_view()
    view = replace(view, lm_head_bias=torch.randn(len(view.lm_head_weight)))
    hidden = torch.randn(3, view.lm_head_weight.shape[1])
    logits = view.logits(hidden)
    assert (Int8View.of(view).logits(hidden) - logits).abs().max() < 0.03 * logits.std()


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_medusa_heads_in_eight_bits_say_nearly_what_they_say(layers):
    llama = load_target("llama", torch.float32)
    head = make_head(llama, "medusa", layers=layers)
    hidden = torch.randn(5, llama.config.hidden_size, generator=torch.Generator().manual_seed(2))
    rounded = in_eight_bits(head)
    compiled = program(rounded.draft_log_probs, torch.device("cpu"))
    with torch.inference_mode():
        for state in hidden:
            own = head.draft_log_probs(state)
            assert (rounded.draft_log_probs(state) - own).abs().max() < 0.03 * own.std()
            assert torch.allclose(compiled(state), rounded.draft_log_probs(state), atol=1e-5)


@pytest.mark.parametrize("kind", ["ctc", "medusa", "hydra", "chimera"])
def test_they_draft_where_programs_do_and_the_text_stays_the_targets(kind, monkeypatch):
    torch.set_num_threads(1)
    llama, plain = load_target("llama", torch.float32), load_target("llama", torch.float32)
    head = make_head(llama, kind)
    llama.compile()
    for target, own in ((plain, 1), (llama, 0)):
        drafter = drafter_for(head, target, 6, int8=own)
        DecodingEngine(target, drafter)
        assert drafter.drafting._rounded is None
    drafter = drafter_for(head, llama, 6)
    assert drafter.drafting._rounded is None  # until steps are compiled: a batch's are not
    engine, settings = DecodingEngine(llama, drafter), GenerationSettings(30)
    assert drafter.drafting._rounded is not None
    calls, product = [], library.few_rows
    monkeypatch.setattr(library, "few_rows", lambda *given: (calls.append(1), product(*given))[1])
    for prompt in make_prompts(llama, 2):
        assert engine.generate(prompt, settings).tokens == vanilla_tokens(plain, prompt, settings)
    assert calls  # while the program was made
    assert drafter.drafting.head is drafter.drafting._exact[0]  # prompts are read by the head as it is


def test_without_a_compiler_programs_draft_with_the_heads_own_weights(monkeypatch):
    llama = load_target("llama", torch.float32)
    monkeypatch.setattr(library, "load", lambda: False)
    drafting = DraftingHead(make_head(llama, "ctc"), 1, llama.decoding_view())
    drafting.prepare()
    assert drafting._rounded is None


def test_levels_are_what_the_tree_is_made_from():
    llama = load_target("llama", torch.float32)
    head = make_head(llama, "medusa")
    drafter = MedusaDrafter(head, llama, 5)
    drafter._last = torch.randn(llama.config.hidden_size, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        tokens, log_probs = drafter.propose_levels()
        best = head.draft_log_probs(drafter._last).topk(5)
    assert tokens.long().tolist() == best.indices.tolist()
    assert torch.equal(log_probs.float(), best.values)


@pytest.mark.parametrize("kind", ["ctc", "medusa", "hydra", "chimera"])
def test_int8_is_a_switch(kind):
    llama = load_target("llama", torch.float32)
    with pytest.raises(ValueError, match="int8 is 0 or 1; got 2"):
        drafter_for(make_head(llama, kind), llama, int8=2)
