"""Numbers of settings and drafters' options are checked where they are given; stop rules cut where they say."""

import numpy as np
import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.drafters.text.rest import RESTDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import HFGenerate
from draft_heads.inference.generation import Generation, GenerationSettings, Stopper
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.target.target import Target
from draft_heads.inference.verify import TypicalAcceptance
from tests.inference.datastores import write_datastore
from tests.inference.models import ScriptedDrafter, in_slots, make_head, small_model
from tests.inference.text_drafters import begin, proposal
from tests.tiny_chat import save_target

NO_WHOLE_NUMBERS = [12.5, 12.0, True, "12", float("nan"), None, [12]]
SETTINGS = {"max_new_tokens": {}, "top_k": {"temperature": 1.0}, "seed": {}}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS)
def test_a_setting_that_counts_is_a_whole_number(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be a whole number; got .*; write for example 12"):
        GenerationSettings(**{name: value}, **SETTINGS[name])


@pytest.mark.parametrize(
    "settings,told",
    [
        ({"max_new_tokens": 0}, "at least 1; got 0"),
        ({"max_new_tokens": -1}, "at least 1; got -1"),
        ({"eos_token_ids": (2.0,)}, "a token of eos_token_ids must be a whole number; got 2.0"),
        ({"eos_token_ids": (-1,)}, r"at least 0; got -1; write \(\) for no end tokens"),
        ({"stop_strings": ("",)}, "at least one character; got ''"),
        ({"stop_strings": (5,)}, "at least one character; got 5"),
        ({"stop": 5}, "stop is a function of the new tokens; got 5"),
        ({"temperature": "0.7"}, "temperature must be a number; got '0.7'"),
        ({"temperature": True}, "temperature must be a number; got True"),
        ({"temperature": 1.0, "top_p": "1"}, "top_p must be a number; got '1'"),
        ({"temperature": 1.0, "top_p": float("nan")}, "top_p must be above 0 and at most 1"),
        ({"temperature": float("inf")}, r"must be 0 \(greedy\) or more, and finite; got inf; leave it out for greedy"),
        ({"temperature": 1e-99}, "temperature must be above 1e-99"),
        ({"typical": True}, "typical is a TypicalAcceptance or None; got True"),
        ({"processors": []}, "processors is a LogitsProcessorList or None; got"),
    ],
)
def test_other_settings_say_their_rule(settings, told):
    with pytest.raises(ValueError, match=told):
        GenerationSettings(**settings)


def test_numbers_of_numpy_are_numbers():
    settings = GenerationSettings(np.int64(5), temperature=np.float32(0.5), top_k=np.int32(3))
    assert (settings.max_new_tokens, settings.sampling.top_k) == (5, 3)
    for wrong in ({"top_k": 2.5}, {"seed": "1"}, {"temperature": "1"}):
        with pytest.raises(ValueError, match="must be a"):
            Sampling(**wrong)
    with pytest.raises(ValueError, match=r"epsilon must be a number; got '0\.1'"):
        TypicalAcceptance("0.1")


@pytest.mark.parametrize("value", [2.5, True, "3"])
def test_an_option_of_a_hybrid_is_a_whole_number(llama, value):
    for name in ("max_nodes", "depth"):
        with pytest.raises(ValueError, match=r"must be a whole number; got (2\.5|True|'3')"):
            HybridDrafter([("a", NgramDrafter()), ("b", PromptLookupDrafter())], llama, **{name: value})


def test_the_longest_n_grams_are_bounded():
    for maker in (NgramDrafter, PromptLookupDrafter):
        maker(n=1024)
        with pytest.raises(ValueError, match="at most 1024 tokens; got n=1025"):
            maker(n=1025)


# ----------------------------------------------------------------------------------------------------
# Stop rules


CUTS = {
    "at the newest": lambda tokens: len(tokens) if len(tokens) == 9 else None,
    "before it": lambda tokens: 4 if len(tokens) == 9 else None,
    "of all": lambda tokens: 0 if len(tokens) == 9 else None,
    "ahead": lambda tokens: 11,
    "ahead, said once": lambda tokens: 11 if len(tokens) == 3 else None,
    "ahead, then less far": lambda tokens: {3: 15, 5: 11, 6: 13}.get(len(tokens)),
    "at the limit": lambda tokens: 2 if len(tokens) == 20 else None,
}


@pytest.mark.parametrize("rule", CUTS)
@pytest.mark.parametrize("depth", [0, 1, 4, 7])
def test_a_stop_rule_cuts_at_the_length_that_it_returns(llama, llama_prompts, rule, depth):
    prompt, settings = llama_prompts[0], GenerationSettings(20, (), stop=CUTS[rule])
    expected = HFGenerate(llama).generate(prompt, settings)
    free = HFGenerate(llama).generate(prompt, GenerationSettings(20, ())).tokens
    drafter = ScriptedDrafter(free, depth) if depth else VanillaDrafter()
    answer = DecodingEngine(llama, drafter).generate(prompt, settings)
    assert (answer.tokens, answer.finish_reason) == (expected.tokens, "stop")
    lengths = {"at the newest": 9, "before it": 4, "of all": 0, "at the limit": 2}
    assert len(answer.tokens) == lengths.get(rule, 11)
    assert sum(answer.accept_lengths) == len(answer.tokens) == len(answer.sources)
    (batched,) = BatchEngine(llama, VanillaDrafter()).generate([prompt], settings)
    assert batched.tokens == answer.tokens and sum(batched.accept_lengths) == len(answer.tokens)


def test_tokens_that_are_taken_back_leave_the_newest_steps(llama):
    stopper = Stopper(GenerationSettings(20, (), stop=lambda tokens: 3 if len(tokens) == 8 else None), llama, 20)
    answer = Generation()
    kept = [stopper.extend(answer, step, [-1] * len(step)) for step in ([5], [6, 7, 8], [1, 2], [3, 4, 9])]
    assert kept == [[5], [6, 7, 8], [1, 2], []]
    assert (answer.tokens, answer.accept_lengths, answer.finish_reason) == ([5, 6, 7], [1, 2, 0, 0], "stop")


@pytest.mark.parametrize("returned", [True, False, 2.0, -1, "3"])
def test_what_a_stop_rule_returns_is_checked(llama, returned):
    with pytest.raises(ValueError, match="what stop returns must be"):
        DecodingEngine(llama, VanillaDrafter()).generate([5, 6], GenerationSettings(4, stop=lambda tokens: returned))


# ----------------------------------------------------------------------------------------------------
# One drafter, one text


def shared(llama):
    ngram, model = NgramDrafter(branches=2), small_model()
    head = drafter_for(make_head(llama), llama, 8)
    yield ngram, ngram
    yield head, head
    yield HybridDrafter([("a", head), ("b", ngram)], llama, 8), ngram
    yield DraftModelDrafter(model, inner := NgramDrafter()), inner


def test_a_drafter_whose_text_another_engine_began_is_refused(llama, llama_prompts):
    for first, second in shared(llama):
        begun = DecodingEngine(llama, first).stream(llama_prompts[0], GenerationSettings(20, ()))
        next(begun)
        other = DecodingEngine(llama, second)
        answer = other.generate(llama_prompts[1], GenerationSettings(20, ()))
        with pytest.raises(RuntimeError, match="with this one's drafter; make an engine with a drafter of its own for"):
            next(begun)
        again = DecodingEngine(llama, first).generate(llama_prompts[1], GenerationSettings(20, ()))
        assert again.tokens == answer.tokens  # one after another is right


def test_engines_share_the_plain_loop(llama, llama_prompts):
    plain = VanillaDrafter()
    texts = [DecodingEngine(llama, plain).stream(prompt, GenerationSettings(8, ())) for prompt in llama_prompts[:2]]
    for first, second in zip(*texts, strict=True):
        assert len(first) == len(second) == 1


def test_a_batch_needs_new_drafters(llama):
    one = NgramDrafter()
    with pytest.raises(ValueError, match="got one twice; make a new one for each"):
        in_slots(lambda: one, 2)
    BatchEngine(llama, one)
    with pytest.raises(ValueError, match="one text at a time; got a drafter of 2 slots; use BatchEngine"):
        DecodingEngine(llama, in_slots(NgramDrafter, 2))
    with pytest.raises(ValueError, match="slots must be at least 1; got 0"):
        build_drafter(DrafterSpec.parse("ngram"), llama, 8, slots=0)


# ----------------------------------------------------------------------------------------------------
# Vocabularies of two sizes


@pytest.mark.parametrize("rows", [100, 211, 300])
def test_a_draft_model_of_another_padding_drafts_the_same_tokens(llama, llama_prompts, rows):
    """The first rows of both vocabularies are one tokenizer's; the target chooses among 211."""
    model = small_model(vocabulary=rows)
    model.draft_only_below(llama.vocab_size)
    settings = GenerationSettings(20, ())
    for drafter in (
        DraftModelDrafter(model),
        DraftModelDrafter(model, NgramDrafter()),
        OuroborosDrafter(model, gamma=2, w=3, p=3),
    ):
        assert drafter.vocabulary == min(rows, 211)
        for prompt in llama_prompts[:2]:
            answer = DecodingEngine(llama, drafter).generate(prompt, settings).tokens
            assert answer == HFGenerate(llama).generate(prompt, settings).tokens
            assert max(answer) >= 100


def test_a_drafter_with_more_tokens_than_the_target_is_refused(llama):
    with pytest.raises(ValueError, match=r"the target's vocabulary, 211 for .*; got one of kind draft_model with 300"):
        DecodingEngine(llama, DraftModelDrafter(small_model(vocabulary=300)))


def test_a_limited_model_chooses_among_the_first_rows():
    model = small_model(vocabulary=300)
    hidden = torch.randn(5, 16, dtype=torch.float64)
    whole = model.logits(hidden)
    model.draft_only_below(211)
    assert torch.equal(model.logits(hidden), whole[:, :211]) and model.vocab_size == 211


def test_draft_models_of_one_tokenizer_are_taken_whatever_their_padding(tmp_path):
    target = Target.from_pretrained(save_target(tmp_path / "target", vocab_size=304), device="cpu")
    for rows in (300, 320):
        folder = save_target(tmp_path / str(rows), vocab_size=rows, hidden_size=16)
        drafter = build_drafter(DrafterSpec.parse(f"draft_model={folder}"), target)
        assert drafter.vocabulary == min(rows, 304)
        settings = GenerationSettings(24, ())
        answers = [DecodingEngine(target, one).generate("Hi", settings) for one in (drafter, VanillaDrafter())]
        assert answers[0].tokens == answers[1].tokens


def test_a_datastore_drafts_no_token_beyond_the_embedding(llama, tmp_path, monkeypatch):
    """The tokenizer has 250 tokens, the target 211 rows: continuations end before the first token beyond."""
    store = write_datastore(tmp_path / "store", [[5, 6, 7, 230, 8], [5, 6, 230, 9]], 250, monkeypatch)
    drafter = RESTDrafter(store, vocabulary=llama.vocab_size)
    begin(drafter, [3, 5])
    assert proposal(drafter) == [(6,), (6, 7)]
    DecodingEngine(llama, drafter).generate([3, 5, 6], GenerationSettings(8, ()))
    with pytest.raises(ValueError, match="got one of kind rest with 250"):
        DecodingEngine(llama, RESTDrafter(store))
