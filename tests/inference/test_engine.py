"""The engine: exact stops, exact contexts, and the drafter's tensors inside it against the training forward."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from draft_heads.heads.base import Rows
from draft_heads.inference import batch
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import Drafter, VanillaDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import ContextError, GenerationSettings
from draft_heads.inference.step import verify_step
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.inference.verify import accept_exact
from tests.inference.models import ScriptedDrafter, load_target, make_head, make_prompts, oracle_of
from tests.tiny_chat import render_prompt

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def target():
    return load_target("llama", torch.float64)


@pytest.fixture(scope="module")
def answer(target):
    return Oracle(target, GenerationSettings(max_new_tokens=60)).answer(PROMPT)


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_accepted_drafts_make_whole_steps_of_depth_plus_one(target, answer, depth):
    result = DecodingEngine(target, ScriptedDrafter(answer, depth)).generate(PROMPT, GenerationSettings(60))
    assert result.tokens == answer
    assert result.accept_lengths[0] == 1
    assert set(result.accept_lengths[1:-1]) == {depth + 1}
    assert sum(result.accept_lengths) == 60 and result.finish_reason == "length"


def test_each_steps_verification_is_timed_without_its_draft(target, answer):
    class Slow(ScriptedDrafter):
        def propose(self):
            time.sleep(0.02)
            return super().propose()

    result = DecodingEngine(target, Slow(answer, 3)).generate(PROMPT, GenerationSettings(60))
    assert result.step_nodes == [3] * (result.target_steps - 1) and len(result.step_seconds) == len(result.step_nodes)
    assert 0 < sum(result.step_seconds) < result.seconds["verify"] + result.seconds["accept"]  # which have the prefill
    plain = DecodingEngine(target, VanillaDrafter(), ahead=True).generate(PROMPT, GenerationSettings(9))
    assert plain.step_nodes == [0] * 8 and min(plain.step_seconds) > 0


def test_acceptance_is_timed_apart_from_the_forward(target, answer, monkeypatch):
    def slow(*args):
        time.sleep(0.02)
        return accept_exact(*args)

    result = DecodingEngine(target, ScriptedDrafter(answer, 9), accept=slow).generate(PROMPT, GenerationSettings(60))
    slept = 0.02 * (result.target_steps - 1)
    assert slept < result.seconds["accept"] < result.seconds["total"] - result.seconds["verify"]
    monkeypatch.setattr(batch, "accept_exact", slow)
    [beside] = BatchEngine(target, ScriptedDrafter(answer, 9)).generate([PROMPT], GenerationSettings(60))
    assert slept < beside.seconds["accept"] < beside.seconds["total"] - beside.seconds["verify"]


def test_a_batch_counts_what_the_plain_loop_does_too_to_no_draft(target, answer, monkeypatch):
    def slow(cache, index, single):
        time.sleep(0.3)
        return copy_sequence(cache, index, single)

    copy_sequence = KVCache.copy_sequence
    monkeypatch.setattr(KVCache, "copy_sequence", slow)
    [found] = BatchEngine(target, ScriptedDrafter(answer, 9)).generate([PROMPT], GenerationSettings(30))
    assert found.seconds["draft"] < 0.3 < found.seconds["other"]


def test_steps_that_start_ahead_are_refused_where_the_drafter_reads_their_tokens(target):
    with pytest.raises(ValueError, match=r"\(ahead=True\) where the drafter reads no tokens .*; got ngram; leave"):
        DecodingEngine(target, NgramDrafter(), ahead=True)


def test_verification_is_not_timed_where_the_next_draft_starts_before_it_has_ended(target):
    drafter = drafter_for(make_head(target, "medusa"), target, 8)
    result = DecodingEngine(target, drafter, ahead=True).generate(PROMPT, GenerationSettings(9))
    assert result.step_nodes == result.step_seconds == []


def test_a_drafter_that_is_always_wrong_costs_one_step_a_token(target, answer):
    wrong = [(token + 1) % 211 for token in answer]
    result = DecodingEngine(target, ScriptedDrafter(wrong, 4)).generate(PROMPT, GenerationSettings(60))
    assert result.tokens == answer and result.accept_lengths == [1] * 60


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_step_without_drafts_is_the_step_of_a_tree_that_is_never_accepted(name):
    target, prompts, found = load_target(name, torch.float64), [PROMPT, PROMPT[::-1]], []
    for empty in (DraftTree.empty(), DraftTree.empty().padded(2)):
        cache, single = target.new_cache(80, 2), target.new_cache(64)
        for place, prompt in enumerate(prompts):
            single.clear()
            target.prefill(torch.tensor(prompt), single)
            cache.copy_sequence(place, single)
        cache.bound, base, steps = len(PROMPT), torch.tensor([5, 9]), []
        for _ in range(3):
            cache.set_visible_length(4)
            steps.append(verify_step(target, cache, base, DraftTree.stack([empty] * 2), 3, target_layers=(1,)))
            base, cache.bound = steps[-1].base, cache.bound + 1
        found.append([(s.tokens, s.next_tokens, s.count, s.source, s.hidden, s.aux_hidden) for s in steps])
        assert cache.lengths.tolist() == [len(PROMPT) + 3] * 2
    for plain, padded in zip(*found):
        for ours, reference in zip(plain, padded):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_trees_may_be_smaller_than_their_drafter_is_deep(target, answer):
    """Accepted paths are filled up to the drafter's depth all the same, also where memory is lent anew."""

    class Shallow(ScriptedDrafter):
        def propose(self):
            return super().propose().take(torch.arange(self.position % 3)[None])

    result = DecodingEngine(target, Shallow(answer, 7)).generate(PROMPT, GenerationSettings(60))
    assert result.tokens == answer and {1, 2, 3} >= set(result.accept_lengths[1:]) > {1}


@pytest.mark.parametrize("length", range(1, 12))
def test_max_new_tokens_is_exact_at_every_place_inside_an_accepted_path(target, answer, length):
    engine = DecodingEngine(target, ScriptedDrafter(answer, 4))
    result = engine.generate(PROMPT, GenerationSettings(max_new_tokens=length))
    assert result.tokens == answer[:length]
    assert sum(result.accept_lengths) == length


@pytest.mark.parametrize("place", range(10))
def test_eos_ends_the_answer_wherever_it_falls_in_an_accepted_path(target, answer, place):
    eos = answer[place]
    expected = answer[: answer.index(eos) + 1]
    engine = DecodingEngine(target, ScriptedDrafter(answer, 4))
    result = engine.generate(PROMPT, GenerationSettings(max_new_tokens=60, eos_token_ids=(eos, 210)))
    assert result.tokens == expected and result.finish_reason == "eos"


def test_a_stop_rule_cuts_inside_an_accepted_path(target, answer):
    settings = GenerationSettings(60, stop=lambda tokens: 8 if len(tokens) >= 8 else None)
    result = DecodingEngine(target, ScriptedDrafter(answer, 5)).generate(PROMPT, settings)
    assert result.tokens == answer[:8] and result.finish_reason == "stop"


def test_streaming_yields_the_steps_of_generate(target, answer):
    engine = DecodingEngine(target, ScriptedDrafter(answer, 3))
    steps = list(engine.stream(PROMPT, GenerationSettings(30)))
    assert [len(step) for step in steps] == engine.generate(PROMPT, GenerationSettings(30)).accept_lengths
    assert [token for step in steps for token in step] == answer[:30]


def test_decoding_goes_to_the_last_position_of_the_context_and_no_further(target):
    prompt = make_prompts(target, 1)[0] * 10
    prompt = prompt[:230]
    settings = GenerationSettings(max_new_tokens=100)
    expected = Oracle(target, settings).answer(prompt)
    for drafter in (
        VanillaDrafter(),
        ScriptedDrafter(expected + [7] * 20, 6),
        drafter_for(make_head(target), target, 16),
    ):
        result = DecodingEngine(target, drafter).generate(prompt, settings)
        assert result.tokens == expected and len(result.tokens) == 26
        assert result.finish_reason == "context"


@pytest.mark.parametrize("length", [0, 256, 300])
def test_prompts_without_room_are_refused_before_any_work(target, length):
    with pytest.raises(ContextError, match="prompt"):
        DecodingEngine(target, VanillaDrafter()).generate([5] * length)


def test_one_engine_answers_prompt_after_prompt_in_the_same_memory(target):
    engine = DecodingEngine(target, drafter_for(make_head(target), target, 8))
    oracle = Oracle(target, GenerationSettings(40))
    caches = set()
    for prompt in make_prompts(target, 6):
        assert engine.generate(prompt, GenerationSettings(40)).tokens == oracle.answer(prompt)
        caches.add(id(engine.steps.cache))
    assert len(caches) == 1


def decode_with_partial_acceptances(target, drafter):
    """The text `drafter` has observed, base token included, in steps of which no, one, two or three drafts are right.

    Beside every draft of the script stands a wrong one, in front of it: accepted rows are never simply the first ones.
    """
    answer = oracle_of(target.name, target.dtype, GenerationSettings(100)).answer(PROMPT)
    hints = ScriptedDrafter(answer, 3)
    step_number = observed = 0
    begin, observe = drafter.begin, drafter.observe

    class Both(Drafter):
        max_nodes, max_depth, on_device = 6, 3, False
        target_layers = drafter.target_layers

        def begin(self, *arguments):
            begin(*arguments)
            hints.begin(*arguments)

        def set_visible_length(self, tokens):
            drafter.set_visible_length(tokens)

        def observe(self, step, slot=None):
            nonlocal observed
            observed += int(step.count)
            observe(step)
            hints.observe(step)

        def propose(self):
            nonlocal step_number
            step_number += 1
            drafter.propose()  # what drafting leaves in the drafter's buffers must not matter
            tree = hints.propose()
            right = torch.where(torch.arange(3) < step_number % 4, tree.tokens, (tree.tokens + 1) % 211)
            tokens = torch.stack([(tree.tokens + 2) % 211, right], dim=2).flatten(1)
            return DraftTree.build(tokens, torch.tensor([[-1, -1, 1, 1, 3, 3]]))

    result = DecodingEngine(target, Both()).generate(PROMPT, GenerationSettings(60))
    assert len(result.accept_lengths) > 20 and set(result.accept_lengths) == {1, 2, 3, 4}
    return torch.tensor([[*PROMPT, *result.tokens][: observed + 1]])


@pytest.mark.parametrize(
    "settings",
    [
        {"context": "hidden+token"},
        {"context": "hidden"},
        {"frames_from": "chain"},
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_drafters_tensors_in_the_engine_equal_the_training_forward(name, settings):
    """After 20 steps with partial acceptances: context keys and values, and the frames drafted from them."""
    target = load_target(name, torch.float32)
    head = make_head(target, **settings).eval()
    drafter = drafter_for(head, target, 16)
    text = decode_with_partial_acceptances(target, drafter)
    committed = int(drafter.length)
    positions = torch.arange(text.shape[1])[None]
    segments = torch.ones_like(text)
    hidden, _ = target.forward_rows(text, segments, positions)
    with torch.inference_mode():
        states = head.context_states(hidden, torch.nn.functional.pad(text[:, 1:], (0, 1)), target.view())
        for block, cache in zip(head.blocks, drafter._caches):
            expected = block.context_keys_values(states[:, :committed], block.rotation(positions[:, :committed] + 1))
            assert torch.allclose(cache.keys[:, :, :committed], expected[0], atol=1e-5)
            assert torch.allclose(cache.values[:, :, :committed], expected[1], atol=1e-5)
        anchor = torch.tensor([[committed - 1]])
        row = (Rows(hidden, text, segments, positions), anchor, target.view())
        assert torch.allclose(drafter.frames()[0], head.drafted_frames(*row)[0, 0], atol=1e-5)
        assert torch.allclose(drafter.frames()[0, 0], head.train_frames(*row)[0, 0, 0], atol=1e-5)


def test_stop_strings_end_where_transformers_ends(tiny_target):
    prompt = tiny_target.tokenizer("The")["input_ids"]
    free = Oracle(tiny_target, GenerationSettings(24)).answer(prompt)
    text = tiny_target.tokenizer.decode(free)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    settings = GenerationSettings(24, stop_strings=(stop,))
    result = DecodingEngine(tiny_target, ScriptedDrafter(free, 5)).generate(prompt, settings)
    ids = torch.tensor([prompt])
    expected = tiny_target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=None,
        stop_strings=[stop],
        tokenizer=tiny_target.tokenizer,
    )[0, len(prompt) :].tolist()
    assert result.tokens == expected and result.finish_reason == "stop"


def test_a_prompt_is_a_text_messages_or_token_ids(tiny_target):
    engine, settings = DecodingEngine(tiny_target, VanillaDrafter()), GenerationSettings(24)
    messages = [{"role": "user", "content": "Name a fruit."}]
    ids = render_prompt(tiny_target.tokenizer, messages)
    answer = engine.generate(ids, settings).tokens
    assert answer == engine.generate("Name a fruit.", settings).tokens == engine.generate(messages, settings).tokens
    shown = "".join(engine.stream_text("Name a fruit.", settings))
    assert shown == tiny_target.tokenizer.decode(answer, skip_special_tokens=True) != ""
    for wrong in (torch.tensor([ids]), tiny_target.tokenizer("a"), ["Name a fruit."], b"Name"):
        of = r"(Tensor|BatchEncoding|list|bytes) of (Tensor|str|int)"
        with pytest.raises(ValueError, match=f"a prompt is a text, .* got {of}"):
            engine.generate(wrong)


@pytest.mark.parametrize("wrong", [999_999, -1])
def test_a_token_that_the_target_does_not_have_is_named(target, wrong):
    with pytest.raises(ValueError, match=rf"token ids are 0 to {target.vocab_size - 1}, .* got {wrong} in a prompt;"):
        DecodingEngine(target, VanillaDrafter()).generate([1, wrong])


def test_a_text_needs_a_tokenizer(target):
    engine = DecodingEngine(target, VanillaDrafter())
    with pytest.raises(ValueError, match="a text needs the target's tokenizer"):
        engine.generate("Name a fruit.")
    with pytest.raises(ValueError, match="streamed text needs a fast tokenizer"):
        next(engine.stream_text(PROMPT))


def test_an_answer_ends_with_the_targets_own_end_tokens_unless_told_otherwise(tiny_target):
    engine = DecodingEngine(tiny_target, VanillaDrafter())
    assert engine.generate("Name a fruit.").finish_reason == "eos"
    assert engine.generate("Name a fruit.", GenerationSettings(eos_token_ids=())).finish_reason == "length"


def test_the_lines_of_the_guide_run(tiny_target, tmp_path, capsys):
    guide = Path("docs/decoding.md").read_text(encoding="utf-8").split("## From Python")[1]
    lines = guide.split("```python\n")[1].split("```")[0]
    assert len(lines.splitlines()) == 12
    make_head(tiny_target, target_fingerprint=tiny_target.fingerprint()).save_pretrained(tmp_path)
    exec(lines.replace("runs/quickstart/ctc/head", str(tmp_path)).replace("data/tiny", "tests/tiny"), {})
    question = lines.split('engine.generate("')[1].split('"')[0]
    plain = DecodingEngine(tiny_target, VanillaDrafter()).generate(question, GenerationSettings(64))
    assert capsys.readouterr().out.startswith(f"{tiny_target.tokenizer.decode(plain.tokens)} ")


@pytest.fixture(scope="module")
def tiny_target():
    return Target.from_pretrained("tests/tiny_target", device="cpu")


def test_an_encoder_decoder_target_is_refused_with_a_sentence(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="decoder-only causal LM"):
        Target.from_pretrained(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    "kind, settings",
    [("ctc", {}), ("ctc", {"frames_from": "chain"}), ("chimera", {}), ("hydra", {"prefix_attention": True})],
)
def test_a_drafter_looks_no_further_than_the_text_may_reach(target, kind, settings, monkeypatch):
    """What lies in a cache behind the text is not read, and the drafts are those of a drafter that reads all of it."""
    drafter = drafter_for(make_head(target, kind, **settings), target, 6)
    whole = drafter_for(make_head(target, kind, **settings), target, 6)
    monkeypatch.setattr(whole, "set_visible_length", lambda tokens: None)
    cache = drafter._caches[0]
    trees = {drafter: [], whole: []}
    for each, made in trees.items():
        propose = each.propose

        def proposing(propose=propose, made=made):
            made.append((propose(), cache.keys.shape[2]))
            return made[-1][0]

        monkeypatch.setattr(each, "propose", proposing)
        engine = DecodingEngine(target, each)
        monkeypatch.setattr(engine.steps, "reserved_length", lambda text: 240)  # as CUDA graphs reserve it
        for prompt in ([5, 6, 7], PROMPT):
            engine.generate(prompt, GenerationSettings(80))
    for (own, _), (other, _) in zip(*trees.values(), strict=True):
        assert own.tokens.tolist() == other.tokens.tolist() and own.parents.tolist() == other.parents.tolist()
        assert torch.allclose(own.log_probs, other.log_probs, atol=1e-4)
    reached = [seen for _, seen in trees[drafter]]
    whole_size = cache.memory()[0].shape[1]
    assert min(reached) < whole_size / 2 and len(set(reached)) > 1  # it grows with the text …
    answers = [before for before, after in pairwise(reached) if after < before]
    assert len(answers) == 1  # … and begins anew with the next
