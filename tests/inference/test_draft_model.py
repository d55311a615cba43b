"""Draft models: whatever they say the tokens are the target's; their cache is that of the text, however it goes on."""

from itertools import accumulate

import pytest
import torch

from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.models.draft_loop import DraftLoop
from draft_heads.inference.drafters.models.draft_model import (
    CascadeDrafter,
    DraftModelDrafter,
    SelfSpeculativeDrafter,
    skipped_layers,
)
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.evaluate import drafters_of, findings_of
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from tests.inference.models import in_slots, make_head, make_prompts, small_model, vanilla_tokens

TINY = "tests/tiny_target"
MAKERS = {
    "small": lambda target: DraftModelDrafter(small_model()),
    "itself": lambda target: DraftModelDrafter(target, k=3),
    "cascade": lambda target: DraftModelDrafter(target, NgramDrafter(k=3, branches=2), k=8),
    "lookahead inside": lambda target: DraftModelDrafter(small_model(), LookaheadDrafter(n=3, w=4), k=6),
    "a draft model inside": lambda target: DraftModelDrafter(target, DraftModelDrafter(small_model(), k=2), k=6),
    "some layers": lambda target: SelfSpeculativeDrafter(target.without_layers([1])),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_tokens_are_the_targets_own(target, kind):
    engine = DecodingEngine(target, MAKERS[kind](target))
    for prompt in [*make_prompts(target, 2), [5]]:
        result = engine.generate(prompt, GenerationSettings(40))
        assert result.tokens == Oracle(target, GenerationSettings(40)).answer(prompt)


@pytest.mark.parametrize("kind", MAKERS)
def test_drawn_tokens_are_those_of_the_plain_loop(llama, kind):
    settings = GenerationSettings(30, temperature=0.8, top_k=20, seed=3)
    engine = DecodingEngine(llama, MAKERS[kind](llama))
    for prompt in make_prompts(llama, 2):
        assert engine.generate(prompt, settings).tokens == vanilla_tokens(llama, prompt, settings)


@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("inner", [None, NgramDrafter])
def test_the_target_accepts_all_that_it_drafts_itself(target, k, inner):
    drafter = DraftModelDrafter(target, inner and inner(), k=k)
    result = DecodingEngine(target, drafter).generate(make_prompts(target, 1)[0], GenerationSettings(61))
    assert result.accept_lengths[0] == 1 and set(result.accept_lengths[1:-1]) == {k + 1}
    if inner is None:
        drafts = sum(
            min(k, 61 - before) for before in accumulate(result.accept_lengths[:-1])
        )  # as far as there is room
        assert drafter.findings() == {"draft_tokens": drafts, "draft_forwards": drafts}


def test_a_cascade_drafts_several_tokens_a_forward(llama):
    repeating = make_prompts(llama, 1)[0][:10] * 4
    cascade = CascadeDrafter(llama, DraftModelDrafter(llama, k=4), k=8)
    result = DecodingEngine(llama, cascade).generate(repeating, GenerationSettings(61))
    assert set(result.accept_lengths[1:-1]) == {9}
    found = cascade.findings()
    assert found["draft_tokens"] > 2 * found["draft_forwards"]


@pytest.mark.parametrize("made", [lambda llama: DraftModelDrafter(llama), lambda llama: OuroborosDrafter(llama, w=4)])
def test_what_a_report_says_of_a_batch_is_said_of_its_texts_alone(llama, made):
    """Two of three slots have no text: the figures of the draft model are those of decoding the text by itself."""
    prompt, settings = make_prompts(llama, 1)[0], GenerationSettings(30)
    alone = DecodingEngine(llama, made(llama))
    steps = alone.generate(prompt, settings).target_steps
    batch = BatchEngine(llama, in_slots(lambda: made(llama), 3))
    assert batch.generate([prompt], settings)[0].target_steps == steps
    found = findings_of(drafters_of({"d": batch}))["d"]
    assert found == alone.drafter.findings() and found["draft_forwards"] > 0


def test_a_budget_of_one_node_is_a_draft_of_one_token(llama):
    drafter = DraftModelDrafter(llama, max_nodes=1)
    result = DecodingEngine(llama, drafter).generate(make_prompts(llama, 1)[0], GenerationSettings(21))
    assert set(result.accept_lengths[1:]) == {2}


@pytest.mark.parametrize("positions", [30, 64, 66, 130])
@pytest.mark.parametrize("inner", [None, lambda: LookaheadDrafter(n=3, w=4)])
def test_a_draft_model_stops_where_its_context_ends(llama, positions, inner):
    """Also before it begins: the prompt takes 60 tokens."""
    prompt = (make_prompts(llama, 1)[0] * 3)[:60]
    drafter = DraftModelDrafter(small_model(positions=positions), inner and inner(), k=4)
    settings = GenerationSettings(80)
    assert DecodingEngine(llama, drafter).generate(prompt, settings).tokens == Oracle(llama, settings).answer(prompt)
    assert (drafter.loop.forwards == 0) == (positions == 30)


@pytest.mark.parametrize("kind", MAKERS)
def test_decoding_goes_to_the_last_position_of_the_context(target, kind):
    prompt = (make_prompts(target, 1)[0] * 12)[:230]
    result = DecodingEngine(target, MAKERS[kind](target)).generate(prompt, GenerationSettings(100))
    assert result.tokens == Oracle(target, GenerationSettings(100)).answer(prompt)
    assert len(result.tokens) == 26 and result.finish_reason == "context"


def continuations(loop, model, prompt):
    """Texts that go on as drafted, in part, not at all, by more tokens than were drafted, and by nothing."""
    text = list(prompt)
    for step, keep in enumerate([3, 1, 0, 4, 2, 4, 0]):
        drafted = loop.draft(text, 4)
        yield text, drafted
        text = [*text, *drafted[:keep], (drafted[keep : keep + 1] or [7])[0] + 1, *range(9, 9 + step)]


@pytest.mark.parametrize("inner", [None, lambda: LookaheadDrafter(n=3, w=4), lambda: NgramDrafter(k=3, branches=2)])
@torch.inference_mode()
def test_the_cache_after_any_continuation_is_that_of_a_fresh_forward(target, inner):
    prompt = make_prompts(target, 1)[0]
    loop = DraftLoop(target, inner and inner())
    loop.begin(200)
    if inner is not None:
        loop.inner.begin(0, torch.tensor(prompt), 200)
    for text, drafted in continuations(loop, target, prompt):
        alone = DraftLoop(target)
        alone.begin(200)
        assert drafted[:4] == alone.draft(text, len(drafted))[:4]
        cached = [*text, *drafted[:-1]]
        fresh = target.new_cache(256)
        target.prefill(torch.tensor(cached), fresh)
        assert int(loop.cache.lengths) == loop.cache.bound == len(cached)
        assert torch.allclose(loop.cache.store[..., : len(cached), :], fresh.store[..., : len(cached), :], atol=1e-12)


class Witness(Drafter):
    """Proposes what it is given and keeps what it was told."""

    max_nodes = max_depth = 2

    def begin(self, slot, prompt, capacity):
        self.tokens, self.hidden = [], []

    def observe(self, step, slot=None):
        (tokens,), (hidden,), (following,) = step.tokens, step.hidden, step.next_tokens
        assert len(tokens) == len(hidden) == len(following) >= int(step.count)
        assert not self.tokens or self.base == tokens[0]
        self.tokens += tokens.tolist()[: int(step.count)]
        self.hidden += list(hidden[: int(step.count)])
        self.base = step.base

    def propose(self):
        return DraftTree.build((self.base + torch.arange(1, 3))[None] % 211, torch.tensor([[-1, 0]]))


@torch.inference_mode()
def test_the_drafter_inside_is_told_the_text_and_the_draft_models_states(llama):
    prompt = make_prompts(llama, 1)[0]
    witness = Witness()
    loop = DraftLoop(llama, witness)
    loop.begin(200)
    for text, drafted in continuations(loop, llama, prompt):
        told = [*witness.tokens, int(witness.base)]
        assert told[: len(text)] == text and told[len(text) :] == drafted[: len(told) - len(text)]
        row = torch.tensor([witness.tokens])
        expected = llama.forward_rows(row, torch.ones_like(row), torch.arange(row.shape[1])[None])[0][0]
        assert torch.allclose(torch.stack(witness.hidden), expected, atol=1e-4)


def test_a_head_may_draft_for_the_draft_model(llama):
    settings = GenerationSettings(40)
    for kind, options in (("ctc", {}), ("hydra", {"prefix_attention": True})):
        drafter = DraftModelDrafter(llama, drafter_for(make_head(llama, kind, **options), llama, 8), k=6)
        result = DecodingEngine(llama, drafter).generate(make_prompts(llama, 1)[0], settings)
        assert set(result.accept_lengths[1:-1]) == {7}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_answers_as_one_by_one(llama, batch):
    prompts = make_prompts(llama, 4)
    model = small_model()
    for make in (lambda: DraftModelDrafter(model, k=3), lambda: DraftModelDrafter(llama, NgramDrafter(), k=3)):
        alone = DecodingEngine(llama, make())
        for settings in (GenerationSettings(30), GenerationSettings(20, temperature=1.0)):
            together = BatchEngine(llama, in_slots(make, batch)).generate(prompts, settings)
            expected = [alone.generate(prompt, settings) for prompt in prompts]
            assert [a.tokens for a in together] == [a.tokens for a in expected]
            assert [a.accept_lengths for a in together] == [a.accept_lengths for a in expected]


def test_skipped_layers_are_every_second_but_the_outermost():
    assert skipped_layers("", 6) == [1, 3] and skipped_layers("", 3) == [1]
    assert skipped_layers("0/2", 4) == [0, 2]
    for skip, layers in (("", 2), ("4", 4), ("-1", 4), ("0/1", 2), ("", 1)):
        with pytest.raises(ValueError, match="names some but not all"):
            skipped_layers(skip, layers)
    with pytest.raises(ValueError, match="names some but not all"):
        skipped_layers("one", 4)


@torch.inference_mode()
def test_the_layers_left_share_the_weights_and_say_something_else(target):
    left = target.without_layers([0])
    assert left.fused.layers[0] is target.fused.layers[1] and left.layer_types == target.layer_types[1:]
    prompt = torch.tensor(make_prompts(target, 1)[0])
    whole, part = (model.prefill(prompt, model.new_cache(128))[1] for model in (target, left))
    assert len(left.new_cache(1).layers) == 1 and not torch.allclose(whole, part, atol=0.1)


def test_targets_of_another_family_cannot_skip_layers():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=3, n_head=2)
    with pytest.raises(ValueError, match="self_speculative needs a target that the fused forward serves"):
        Target(GPT2LMHeadModel(config)).without_layers([1])


@pytest.fixture(scope="module")
def tiny():
    return Target.from_pretrained(TINY, device="cpu")


@pytest.mark.parametrize(
    "words", ["draft_model={0},k=4", "mine={0},k=4", "cascade={0},k=4", "d=draft_model:{0},k=4,via=ngram"]
)
def test_the_words_of_the_command_line_build_them(tiny, words):
    drafter = build_drafter(DrafterSpec.parse(words.format(TINY)), tiny)
    prompt = make_prompts(tiny, 1)[0]
    result = DecodingEngine(tiny, drafter).generate(prompt, GenerationSettings(31))
    assert set(result.accept_lengths[1:-1]) == {5}
    assert (drafter.loop.inner is not None) == ("ngram" in words or "cascade" in words)


@pytest.mark.parametrize(
    "words,told",
    [
        ("draft_model", "needs a path; got none; write draft_model=MODEL"),
        ("draft_model=no/such/folder", "no/such/folder does not exist"),
        (f"draft_model={TINY},k=0", "k must be at least 1; got 0"),
        (f"draft_model={TINY},via=magic", "a drafter is one of"),
        (f"draft_model={TINY},n=3", "unknown option n of a draft_model drafter"),
        ("self_speculative=somewhere", "loads nothing"),
        ("self_speculative,skip=9", "names some but not all"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny, words, told):
    with pytest.raises(ValueError, match=told):
        build_drafter(DrafterSpec.parse(words), tiny)


def test_a_model_of_other_tokens_is_refused(tiny, llama, tmp_path):
    small_model(vocabulary=300).model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a vocabulary of 300 against the target's 211; pick"):
        build_drafter(DrafterSpec.parse(f"draft_model={tmp_path}"), llama)
    small_model(vocabulary=tiny.config.vocab_size).model.save_pretrained(tmp_path)
    assert build_drafter(DrafterSpec.parse(f"draft_model={tmp_path}"), tiny).max_depth == 5
    other = Target.from_pretrained(TINY, device="cpu")
    other.tokenizer.eos_token, other.tokenizer.bos_token = "a", "b"  # as of a base model beside its fine-tune
    assert tokenizer_hash(other.tokenizer) != tokenizer_hash(tiny.tokenizer)
    assert build_drafter(DrafterSpec.parse(f"draft_model={tmp_path}"), other).max_depth == 5
    other.tokenizer.add_tokens(["brandnew"])
    with pytest.raises(ValueError, match=r"has the tokenizer .* against the target's"):
        build_drafter(DrafterSpec.parse(f"draft_model={tmp_path}"), other)


@pytest.mark.parametrize("positions,told", [(1023, True), (1024, False), (4096, False)])
def test_a_draft_model_of_a_shorter_context_is_told_where_it_is_loaded(tiny, tmp_path, caplog, positions, told):
    small_model(vocabulary=tiny.config.vocab_size, positions=positions).model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    build_drafter(DrafterSpec.parse(f"cascade={tmp_path}"), tiny)
    lines = [record.getMessage() for record in caplog.records if "positions" in record.getMessage()]
    assert len(lines) == told and all("the target's 1024 positions" in line and "has 1023" in line for line in lines)
