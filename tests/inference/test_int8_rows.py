"""Eight-bit weights draft what the head's own weights draft, but for their rounding."""

import pytest
import torch

from inference.drafters.medusa import MedusaDrafter
from inference.drafters.registry import drafter_for
from inference.engine import DecodingEngine, GenerationSettings
from inference.int8_rows import Int8Offsets, Int8Rows
from inference.program import program
from tests.inference.models import load_target, make_head, make_prompts, vanilla_tokens


def test_a_product_is_as_exact_as_the_rounding():
    weight = torch.randn(3, 50, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 50)[:, None]
    vectors = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    rows = Int8Rows(list(weight))
    assert rows.steps.dtype == torch.int8 and rows.steps.abs().amax(-1).eq(127).all()
    exact = (weight @ vectors[..., None])[..., 0]
    off = weight.abs().amax(-1) / 127 / 2 * vectors.abs().sum(-1, keepdim=True)  # each weight by half a step at most
    assert ((rows(vectors) - exact).abs() <= off * 1.001).all()


def test_a_row_of_zeros_stays_one():
    assert Int8Rows([torch.zeros(2, 4)])(torch.ones(1, 4)).tolist() == [[0, 0]]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_heads_in_eight_bits_say_nearly_what_they_say(layers):
    llama = load_target("llama", torch.float32)
    head = make_head(llama, "medusa", layers=layers)
    hidden = torch.randn(5, llama.config.hidden_size, generator=torch.Generator().manual_seed(2))
    rounded = Int8Offsets(head.each)
    compiled = program(rounded.log_probs, torch.device("cpu"))
    with torch.inference_mode():
        for state in hidden:
            own = head.draft_log_probs(state)
            assert (rounded.log_probs(state) - own).abs().max() < 0.03 * own.std()
            assert torch.allclose(compiled(state), rounded.log_probs(state), atol=1e-5)


def test_they_draft_where_programs_do_and_the_text_stays_the_targets():
    torch.set_num_threads(1)
    llama, plain = load_target("llama", torch.float32), load_target("llama", torch.float32)
    head = make_head(llama, "medusa")
    llama.compile()
    for target, own in ((plain, 1), (llama, 0)):
        drafter = drafter_for(head, target, 6, int8=own)
        DecodingEngine(target, drafter)
        assert drafter._int8 is None
    drafter = drafter_for(head, llama, 6)
    assert drafter._int8 is None  # until steps are compiled: a batch's are not
    drafter.prepare()
    assert isinstance(drafter._int8, Int8Offsets)
    called = []
    drafter._int8.log_probs = lambda hidden, own=drafter._int8.log_probs: (called.append(hidden), own(hidden))[1]
    engine, settings = DecodingEngine(llama, drafter), GenerationSettings(30)
    for prompt in make_prompts(llama, 2):
        assert engine.generate(prompt, settings).tokens == vanilla_tokens(plain, prompt, settings)
    assert called


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


def test_int8_is_a_switch():
    llama = load_target("llama", torch.float32)
    with pytest.raises(ValueError, match="int8 is 0 or 1; got 2"):
        MedusaDrafter(make_head(llama, "medusa"), llama, int8=2)
