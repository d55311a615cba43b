"""Every registered drafter keeps the contract of `Drafter`; a new one is tested once the registry has its line."""

import functools
import itertools
import json
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch

from draft_heads.data.datastore import DEPTH, Datastore
from draft_heads.data.datastore_build import suffix_array
from draft_heads.inference.drafters.base import forget_all
from draft_heads.inference.drafters.registry import DRAFTERS, HEAD_DRAFTERS, DrafterBuilder, DrafterSpec, options_of
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.evaluate import described
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.evaluation.replay import AnswerStates, replay_all
from draft_heads.inference.generation import Generation, GenerationSettings
from draft_heads.scripts.checks.lossless_matrix import make_prompts, trained_head
from tests.inference.models import load_target
from tests.inference.test_ahead import HostQuestions
from tests.inference.trees import check_tree

RULES = GenerationSettings(24, ())
MAX_NODES = 12

NEEDED = {"self_speculative": "skip=1", "lookahead": "n=3,w=4", "ouroboros": "gamma=2,w=3,p=3"}
"""Kind → options without which it cannot run on a target of two layers, or would draft longer than the tests' texts."""
MORE = {
    "ngram": ("branches=2", "branches=3,keep=1"),
    "chimera": ("kgram_cache=16",),
    "draft_model": ("via=ngram",),
    "lookahead": ("max_nodes=9",),
    "medusa": ("heads=2",),
}
"""Kind → options to try beside every choice of those that have choices."""


def variants(kind):
    """The words of a kind with its defaults, with each choice of its options, and with what `MORE` names."""
    options_type, needed = DRAFTERS[kind].options_type, NEEDED.get(kind, "")
    choices = [
        f"{f.name}={choice}"
        for f in fields(options_type)
        for choice in f.metadata.get("choices", ())
        if choice != f.default
    ]
    path = ":path" if DRAFTERS[kind].loads else ""
    for words in ("", *choices, *MORE.get(kind, ())):
        yield ",".join(filter(None, (f"{kind}{path}", needed, words)))


ALONE = {kind: next(variants(kind)) for kind in DRAFTERS}
WORDS = [words for kind in DRAFTERS for words in variants(kind)]
PARTS = [kind for kind in DRAFTERS if kind != "vanilla"]
TWO = dict.fromkeys((*itertools.pairwise(PARTS), *((kind, "ngram") for kind in PARTS)))
PAIRS = [f"{ALONE[a]}+{ALONE[b]}" for a, b in TWO]


@functools.cache
def target():
    return load_target("llama", torch.float64)


@functools.cache
def prompts():
    """The first goes round in circles, so that drafts are accepted; the second ends like it, so that what a drafter has
    kept of the first would be drafted."""
    first, second = make_prompts(target(), 2)
    first = [*first, *Oracle(target(), GenerationSettings(50, ())).answer(first)]
    return first, [*second, *first[-12:]]


@functools.cache
def answers():
    return [Oracle(target(), RULES).answer(prompt) for prompt in prompts()]


@functools.cache
def long_answer(number):
    return Oracle(target(), GenerationSettings(60)).answer(make_prompts(target(), number + 1)[number])


@functools.cache
def datastore():
    """The prompts and the first answer."""
    tokens = np.array([*prompts()[0], *answers()[0], *prompts()[1], 211])  # 211 separates
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=212))])
    return Datastore(tokens, suffix_array(tokens), starts, {"vocab_size": 211, "depth": DEPTH})


@functools.cache
def draft_model():
    """The target with noise on its weights, which often agrees with it."""
    model = load_target("llama", torch.float64)
    torch.manual_seed(2)
    for parameter in model.model.parameters():
        parameter.data += 0.1 * parameter.std().nan_to_num() * torch.randn_like(parameter)
    return model


@functools.cache
def head(kind):
    """A head that has learned the answers, so that many drafts are accepted."""
    return trained_head(target(), list(zip(prompts(), answers())), steps=40, kind=kind)


class Builder(DrafterBuilder):
    """Gives this file's head of the kind or its draft model, whatever the path is."""

    def head(self, kind, path):
        return head(kind)

    def draft_model(self, kind, path):
        return draft_model()


LOADED = {"", "RUN/head", "MODEL", "DATASTORE"}
"""What drafters may load (`Drafter.loads`) and the fixtures of this file stand for."""


def build(words, max_nodes=MAX_NODES):
    """A new drafter of `KIND[:path][,option=value…][+…]`."""
    spec = DrafterSpec.parse(f"drafter={words}")
    for part in spec.parts:
        loads = DRAFTERS[part.kind].loads
        assert loads in LOADED, (
            f"{part.kind} loads {loads}, for which {Path(__file__).name} has no stand-in: give it one in `Builder` or "
            "in `open_datastore`, and add it to `LOADED`"
        )
    return Builder(target(), max_nodes).build(spec)


@pytest.fixture(autouse=True)
def open_datastore(monkeypatch):
    monkeypatch.setattr(Datastore, "open", lambda path: datastore())


def depth(tree):
    """Of the deepest node."""
    found = []
    for parent in tree.parents[0].tolist():
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return max(found, default=0)


def same_tree(one, other):
    return one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()


def decode(drafter, which=(0, 1)):
    """Answers to the prompts and the trees that were proposed for each."""
    engine, propose = DecodingEngine(target(), drafter), drafter.propose
    results, trees = [], []
    for number in which:
        own = []
        drafter.propose = lambda own=own: own.append(propose()) or own[-1]
        results.append(engine.generate(prompts()[number], RULES))
        trees.append(own)
    del drafter.propose
    return results, trees


@pytest.mark.parametrize("words", [*WORDS, *PAIRS])
def test_decoding_is_lossless_trees_keep_their_rules_and_the_second_text_starts_clean(words):
    drafter = build(words)
    results, trees = decode(drafter)
    assert [result.tokens for result in results] == answers()
    for tree in itertools.chain(*trees):
        check_tree(tree)  # parents before children, siblings differ
        assert len(tree) <= drafter.max_nodes and depth(tree) <= drafter.max_depth
        assert all(token < (drafter.vocabulary or target().vocab_size) for token in tree.tokens[0].tolist())
    json.dumps(drafter.findings())
    if drafter.carries_over:
        forget_all(drafter)
        results[1:], trees[1:] = decode(drafter, which=[1])
    (alone,), (fresh,) = decode(build(words), which=[1])
    assert alone.accept_lengths == results[1].accept_lengths
    assert all(same_tree(one, other) for one, other in zip(fresh, trees[1], strict=True))


@pytest.mark.parametrize("words", WORDS)
def test_a_drafter_that_says_on_device_copies_nothing_to_the_host(words):
    drafter = build(words)
    if not drafter.on_device:
        return
    observe, propose, calls, asked = drafter.observe, drafter.propose, [], []

    def watched(call, *given):
        with HostQuestions() as questions:
            result = call(*given)
        calls.append(call)
        asked.extend(questions.asked)
        return result

    drafter.observe = lambda *given: watched(observe, *given)
    drafter.propose = lambda: watched(propose)
    answer = DecodingEngine(target(), drafter, ahead=True).generate(prompts()[0], RULES)  # inside `no_host_sync`
    assert answer.tokens == answers()[0] and len(calls) > 5 and not asked


def replays(words):
    """Whether an answer's text and the target's states along it are all that the parts of a drafter read."""
    kinds = [part.split(",")[0].split(":")[0] for part in words.split("+")]
    return all(kind in HEAD_DRAFTERS or DRAFTERS[kind].text_only for kind in kinds)


@pytest.mark.parametrize("words", filter(replays, [*WORDS, *PAIRS]))
def test_replaying_an_engines_answers_takes_the_same_steps(words):
    """Random targets soon repeat themselves, so that drafts are accepted; half the answers end at EOS."""
    engine, replayed, drafted = DecodingEngine(target(), build(words)), build(words), 0
    states = AnswerStates(target(), [replayed])
    for number, prompt in enumerate(make_prompts(target(), 4)):
        ends = (long_answer(number)[-7],) if number % 2 else ()
        decoded = engine.generate(prompt, GenerationSettings(60, eos_token_ids=ends))
        turn = TurnRecord("own", number, number, None, 0, "", tuple(prompt), "", Generation(decoded.tokens))
        again = replay_all("own", {"it": replayed}, [], [turn], states=states).records[0].generation
        assert again.tokens == decoded.tokens
        assert again.accept_lengths == decoded.accept_lengths
        assert again.sources[:-1] == decoded.sources[:-1]  # where the length ends an answer, nobody drafts the last
        drafted += sum(source >= 0 for source in decoded.sources)
    assert (drafted > 0) == bool(engine.drafter.max_nodes)
    assert (states.turns, states.not_greedy, states.note()) == (4, 0, None)


# ----------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize("words", WORDS)
def test_reports_have_the_options_that_were_parsed(words):
    drafter = build(words)
    _, (parsed,) = options_of(DrafterSpec.parse(f"drafter={words}"), MAX_NODES)
    assert drafter.options == parsed
    reported = json.loads(json.dumps(described({"mine": drafter})["options"]["mine"]))
    expected = asdict(parsed)
    if expected.get("tree_temperature", 0) is None:
        expected["tree_temperature"] = drafter.head.config.tree_temperature  # the checkpoint's
    assert reported == expected
    for pair in words.split(",")[1:]:
        name, value = pair.split("=")
        assert str(reported[name]) == value
    if "max_nodes" in reported and "max_nodes=" not in words:
        assert reported["max_nodes"] in (MAX_NODES, 0)  # 0: no limit, where the drafter declares so


def test_reports_have_the_options_of_a_hybrid_and_of_its_parts():
    reported = build("ngram,n=3,depth=5+medusa:path,heads=2").settings()
    assert (reported["max_nodes"], reported["depth"], reported["parts"]["medusa"]["heads"]) == (MAX_NODES, 5, 2)
    assert reported["parts"]["ngram"] == {"n": 3, "keep": 0}  # what else n-grams have is the hybrid's


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("value", [2.5, True, "3"])
def test_an_option_that_counts_is_a_whole_number(kind, value):
    _, (usual,) = options_of(DrafterSpec.parse(f"mine={ALONE[kind]}"))
    for name in [f.name for f in fields(usual) if isinstance(f.default, int)]:
        with pytest.raises(ValueError, match=rf"option {name} must be (a|one of) .*got (2\.5|True|'3')"):
            DRAFTERS[kind].from_options("path", Builder(target()), **{**asdict(usual), name: value})


@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_unknown_option_is_answered_with_the_valid_ones(kind):
    path = ":path" if DRAFTERS[kind].loads else ""
    with pytest.raises(ValueError, match=f"unknown option size of a {kind} drafter; valid are") as refused:
        DrafterSpec.parse(f"mine={kind}{path},size=3")
    assert all(f.name in str(refused.value) for f in fields(DRAFTERS[kind].options_type))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_path_is_given_where_one_is_loaded_and_nowhere_else(kind):
    loads = DRAFTERS[kind].loads
    with pytest.raises(ValueError, match=f"write {kind}={loads}" if loads else f"{kind} loads nothing; got the path"):
        DrafterSpec.parse(f"mine={kind}:{'' if loads else 'path'}")


# ----------------------------------------------------------------------------------------------------
# Declarations


def test_every_drafter_declares_its_name_what_it_drafts_and_the_help_of_its_options():
    for kind, drafter in DRAFTERS.items():
        assert drafter.kind == kind and drafter.title, f"{drafter.__name__} needs a `title`: what it drafts"
        assert kind == "vanilla" or kind in drafter.sources or drafter.loads == "RUN/head"
        for f in fields(drafter.options_type):
            assert f.metadata.get("help"), f"{drafter.options_type.__name__}.{f.name} needs a help text: `option(…)`"


def test_a_drafter_that_loads_what_the_tests_do_not_have_is_named(monkeypatch):
    monkeypatch.setattr(DRAFTERS["rest"], "loads", "ORACLE")
    with pytest.raises(AssertionError, match=r"rest loads ORACLE, for which test_every_drafter\.py has no"):
        build("rest:path")
