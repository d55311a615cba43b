"""Stop rules over answers that come in runs of any lengths: all is as if the tokens had come one by one."""

import functools
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import HFGenerate, hf_generate
from draft_heads.inference.generation import Generation, GenerationSettings, Stopper, TextPieces
from draft_heads.inference.target.target import Target
from tests.inference.models import ForkedDrafter, ScriptedDrafter
from tests.tiny_chat import render_prompt

LETTERS = "abcé "


class Letters:
    """A token is a letter."""

    def decode(self, tokens, **options):
        return "".join(LETTERS[token] for token in tokens)


@st.composite
def settings_and_limits(draw, tokens, strings):
    """Any mixture of rules, and the room that the context leaves."""
    most = draw(st.one_of(st.integers(1, 30), st.just(60)))
    at = draw(st.one_of(st.tuples(st.integers(6, 20), st.integers(0, 22)), st.none()))
    rule = None if at is None else lambda given: at[1] if len(given) >= at[0] else None
    ends = tuple(draw(st.one_of(st.just([]), st.lists(tokens, max_size=2, unique=True))))
    stops = tuple(draw(st.one_of(st.just([]), st.lists(strings, max_size=2))))
    return GenerationSettings(most, ends, stops, rule), draw(st.sampled_from([most, most, most, 7, 19]))


def one_by_one(tokens, settings, limit, decode):
    """(tokens, why they end, tokens that came) of an answer, written down from `GenerationSettings`' words alone."""
    for total in range(1, len(tokens) + 1):
        given = tokens[:total]
        cut = None if settings.stop is None else settings.stop(given)
        if cut is not None and cut < total:
            return given[:cut], "stop", total
        if given[-1] in settings.eos_token_ids:
            return given, "eos", total
        if cut == total or any(text in decode(given) for text in settings.stop_strings):
            return given, "stop", total
        if total == min(limit, settings.max_new_tokens):
            return given, "length" if settings.max_new_tokens <= limit else "context", total
    return tokens, "", len(tokens)


@given(st.data(), st.lists(st.integers(0, len(LETTERS) - 1), min_size=20, max_size=40))
def test_runs_end_where_single_tokens_end(data, tokens):
    letters, whole = Letters(), Letters().decode(tokens)
    text = st.integers(3, len(tokens) - 4).map(lambda at: whole[at : at + 4])  # it spans several runs
    settings, limit = data.draw(settings_and_limits(st.integers(0, len(LETTERS) - 1), text))
    limit = min(limit, settings.max_new_tokens)
    stopper = Stopper(settings, SimpleNamespace(tokenizer=letters, end_token_ids=(0,)), limit)
    answer, given, steps = Generation(), 0, []
    while given < len(tokens) and not answer.finish_reason:
        run = tokens[given : given + data.draw(st.integers(1, 9))]
        steps.append(stopper.extend(answer, run, list(range(given, given + len(run)))))
        given += len(run)
    expected, reason, came = one_by_one(tokens, settings, limit, letters.decode)
    assert (answer.tokens, answer.finish_reason) == (expected, reason)
    assert answer.sources == list(range(len(expected)))  # each token keeps the source that it came with
    assert sum(answer.accept_lengths) == len(expected) and len(answer.accept_lengths) == len(steps)
    assert min(answer.accept_lengths) >= 0
    streamed = [token for step in steps for token in step]
    assert streamed[: len(expected)] == expected and len(streamed) <= came
    if len(streamed) == len(expected):  # nothing was taken back
        assert answer.accept_lengths == list(map(len, steps))
        shown = [*streamed[: len(streamed) - len(steps[-1])], *answer.shown(steps[-1])]
        assert shown == (expected[:-1] if reason == "eos" else expected)


def test_a_stop_string_may_begin_in_an_earlier_run():
    settings, target = GenerationSettings(9, (), ("abc",)), SimpleNamespace(tokenizer=Letters(), end_token_ids=(0,))
    stopper, answer = Stopper(settings, target, 9), Generation()
    stopper.extend(answer, [4, 0], [0, 1])
    stopper.extend(answer, [1, 2, 3], [2, 3, 4])
    assert (answer.tokens, answer.finish_reason) == ([4, 0, 1, 2], "stop")


@functools.cache
def tiny():
    """The embedded target, a prompt, and its free answer."""
    target = Target.from_pretrained("data/tiny_target", "float32", "cpu")
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": "Please calculate: 38 + 5, 41 + 27"}])
    return target, prompt, hf_generate(target, prompt, GenerationSettings(40, ()), 40)


@given(st.data(), st.integers(0, 9), st.booleans())
def test_engines_stop_stream_and_count_as_generate_does(data, depth, forked):
    target, prompt, free = tiny()
    text = target.tokenizer.decode(free)
    start = st.integers(0, len(text) - 4)
    settings, _ = data.draw(settings_and_limits(st.sampled_from(free), start.map(lambda at: text[at : at + 3])))
    drafter = (ForkedDrafter if forked else ScriptedDrafter)(free, depth) if depth else VanillaDrafter()
    engine, answer = DecodingEngine(target, drafter), Generation()
    steps = list(engine.stream(prompt, settings, answer))
    expected = HFGenerate(target).generate(prompt, settings)
    assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)
    assert sum(answer.accept_lengths) == len(answer.tokens) == len(answer.sources)
    assert [len(step) for step in steps] == answer.accept_lengths or sum(map(len, steps)) > len(answer.tokens)
    if sum(map(len, steps)) == len(answer.tokens):
        pieces = TextPieces(target.tokenizer)
        whole = pieces.add(answer.tokens[:-1] if answer.finish_reason == "eos" else answer.tokens) + pieces.end()
        assert "".join(engine.stream_text(prompt, settings)) == whole
    assert engine.generate(prompt, settings).tokens == answer.tokens
