"""Every figure of report.json that answer files hold is recomputed from them: small runs of random drafters."""

import json
import math
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.inference.evaluation.answer_files import write_answers
from draft_heads.inference.evaluation.evaluate import Benchmark
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.evaluation.report import build_report
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import drafter_specs, load_engines
from tests.inference.stub_engine import evaluate
from tests.tiny_chat import render_prompt

WORDS = ("Tell", "me", "a", "story", "about", "the", "cat", "What", "is", "3", "plus", "4", "?", "Count", "to", "ten")
DRAFTERS = ("ngram", "ngram,k=2", "kept=ngram,keep=1", "tree=ngram,branches=3", "prompt_lookup", "lookahead,n=3,w=3")
DRAFTERS += ("hybrid=ngram+prompt_lookup", "itself=draft_model:tests/tiny_target", "plain=vanilla")

turn = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join)
too_long = st.just("story " * 1200)  # more than the target's 1,024 positions
question = st.fixed_dictionaries(
    {"turns": st.lists(turn, min_size=1, max_size=2) | st.tuples(turn, too_long).map(list)},
    optional={"category": st.sampled_from(["writing", "math", "a|b"])},
)
questions = st.lists(question, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def target():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draft_heads.inference.evaluation.evaluate.WARM_UP_TOKENS", 4)
        yield Target.from_pretrained("tests/tiny_target", device="cpu")


def close(value, expected):
    return value is None if expected is None else math.isclose(value, expected, rel_tol=1e-9)


@settings(max_examples=max(1, settings.default.max_examples // 4))  # each is a whole evaluation
@given(
    benchmarks=st.lists(questions, min_size=1, max_size=2),
    drafters=st.lists(st.sampled_from(DRAFTERS), min_size=1, max_size=2, unique_by=lambda text: text.split(",")[0]),
    tokens=st.integers(1, 24),
    batch=st.sampled_from([1, 1, 3]),
)
def test_figures_follow_from_the_answer_files(target, tmp_path_factory, benchmarks, drafters, tokens, batch):
    folder = tmp_path_factory.mktemp("run")
    asked = {}
    for number, rows in enumerate(benchmarks):
        rows = [{"question_id": index, **row} for index, row in enumerate(rows)]
        asked[f"b{number}"] = rows
        (folder / f"b{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    specs = drafter_specs(list(drafters))
    engines = load_engines(specs, target, 16, batch)
    loaded = [Benchmark(name, load_benchmark(name, str(folder / f"{name}.jsonl"))) for name in asked]
    render = partial(render_prompt, target.tokenizer)
    found = evaluate(
        engines, Oracle(target, GenerationSettings(tokens)), loaded, render, group_size=1 if batch == 1 else 4 * batch
    )
    write_answers(folder, found, batch)
    report = build_report(found, {"device": "cpu"}, {"batch_size": batch}, 0)
    report = json.loads(json.dumps(report, allow_nan=False))
    names = ["vanilla", *(text.partition("=")[0].partition(",")[0] for text in drafters)]
    assert {row["drafter"] for row in report["results"]} == set(names)
    answers = {name: read(folder / "answers" / f"{name}.jsonl") for name in names}
    for row in report["results"]:
        rows = [one for one in asked[row["benchmark"]] if row["category"] in (None, one.get("category"))]
        ids = [one["question_id"] for one in rows]
        own = answers[row["drafter"]].get(row["benchmark"], {})
        found = [own[one] for one in ids if one in own]
        check_row(row, rows, found, shared=batch > 1 and row["category"] is not None)
        if batch == 1 or row["category"] is None:
            plain = answers[report["settings"]["plain_loop"]].get(row["benchmark"], {})
            assert close(row["gamma"], ratio([plain[one] for one in ids if one in plain], found))


def read(path):
    """benchmark → question_id → its choice."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["benchmark"], {})[row["question_id"]] = row["choices"][0]
    return found


def check_row(row, asked, found, shared):
    """What a row says of the questions `asked`, from the choices `found` in the answer files; shared: of a category,
    decoded with others."""
    turns, new = sum(len(one["turns"]) for one in found), sum(sum(one["new_tokens"]) for one in found)
    steps, seconds = (sum(sum(one[key]) for one in found) for key in ("decoding_steps", "wall_time"))
    lengths = [length for one in found for turn in one["accept_lengths_per_turn"] for length in turn]
    assert (row["questions"], row["turns"]) == (len(asked), turns)
    assert row["skipped"] == sum(len(one["turns"]) for one in asked) - turns
    assert (row["new_tokens"], row["target_steps"]) == (new, steps) == (sum(lengths), len(lengths))
    assert close(row["beta"], new / steps if steps else None)
    assert close(row["wall_seconds"], None if shared else seconds)
    assert close(row["tokens_per_second"], new / seconds if seconds and not shared else None)
    assert row["cut"] == sum(end in ("length", "context") for one in found for end in one["finish_reasons"])
    lossless = row["lossless"]
    assert lossless["turns"] == turns == sum(lossless[key] for key in ("identical_turns", "near_ties", "unexplained"))
    assert lossless["unexplained"] == 0
    assert (row["time_share"] is None) == (shared or not turns)
    if row["time_share"]:
        assert math.isclose(sum(row["time_share"].values()), 1, rel_tol=1e-9)
    # a step after the prefill accepts all of its tokens but the target's own, or, at an answer's end, all of them
    after = [length for one in found for turn in one["accept_lengths_per_turn"] for length in turn[1:]]
    histogram, least = row["accept_length_histogram"], Counter(length - 1 for length in after)
    accepted = sum(index * count for index, count in enumerate(histogram))
    assert sum(histogram) == len(after) and sum(after) - len(after) <= accepted <= sum(after) - len(after) + turns
    assert sum(abs(histogram[k] - least[k]) for k in range(len(histogram))) <= 2 * turns
    if row["accepted_by_source"] and row["drafter"] != "plain" and row["drafter"] != "vanilla":
        assert sum(row["accepted_by_source"].values()) == accepted
    assert row["score"] is None


def ratio(plain, found):
    """Seconds per token of one's answers over another's, of the turns that both answered."""
    if not plain or not found:
        return None
    per_token = [
        sum(sum(one["wall_time"]) for one in choices) / sum(sum(one["new_tokens"]) for one in choices)
        for choices in (plain, found)
    ]
    return per_token[0] / per_token[1]
