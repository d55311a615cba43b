"""The bench of batches: the answers of every size are those of decoding alone, and a figure is what it says."""

import json
import time
from collections import Counter

import pytest

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import build_drafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench import batch
from draft_heads.scripts.bench.decode import prompts
from draft_heads.scripts.decoding_options import drafter_specs

TOKENS = 12


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("data/tiny_target", "float32", "cpu")


def test_every_size_gives_the_answers_and_beta_of_decoding_alone(target):
    texts = prompts(target, 3, 0)
    rows = batch.measure(target, drafter_specs(["ngram"]), [1, 2], 8, texts, TOKENS, 1)
    assert [(row["drafter"], row["batch_size"]) for row in rows] == [
        *(("vanilla", 1), ("ngram", 1), ("vanilla", 2), ("ngram", 2))
    ]
    engine = DecodingEngine(target, VanillaDrafter())
    plain = [engine.generate(text, GenerationSettings(TOKENS)) for text in texts]
    assert rows[0]["beta"] == sum(len(answer.tokens) for answer in plain) / sum(a.target_steps for a in plain) == 1
    assert rows[1]["beta"] == rows[3]["beta"] >= 1
    assert [row["gamma"] for row in rows if row["drafter"] == "vanilla"] == [1, 1]
    assert rows[0]["over_plain_alone"] == 1 and all(0 <= row["draft_share"] < 1 for row in rows)


@pytest.mark.parametrize("always", [True, False], ids=["each round", "one round"])
def test_answers_that_depend_on_the_batch_or_the_round_are_counted(monkeypatch, capsys, always):
    run, rounds, whole = batch.CountedBatches.run, Counter(), {}

    def last_token_lost(engine, texts, settings):
        if always and engine in whole:
            engine.answers = whole[engine]  # the same in each round
        run(engine, texts, settings)
        rounds[engine] += 1
        if engine.size == 2 and (always or rounds[engine] == 1):
            whole[engine] = engine.answers
            engine.answers = [engine.answers[0][:-1], *engine.answers[1:]]

    monkeypatch.setattr(batch.CountedBatches, "run", last_token_lost)
    arguments = ["batch.py", "--target", "data/tiny_target", "--sizes", "2", "--questions", "2", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", [*arguments, "--max_new_tokens", str(TOKENS)])
    assert not batch.main()
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])["rows"]
    others = {(row["drafter"], row["batch_size"]): row["other_answers"] for row in rows}
    assert others == {("vanilla", 1): 0, ("ngram", 1): 0, ("vanilla", 2): 1, ("ngram", 2): 1}
    assert "2 answers are not those of decoding alone" in err


def test_a_drafter_that_would_know_the_texts_of_earlier_rounds_is_refused(target):
    for words in ("kept=ngram,keep=1", "kept=ngram,keep=1+prompt_lookup"):
        with pytest.raises(ValueError, match="'kept' keeps what it learned of them; leave that off"):
            batch.measure(target, drafter_specs([words]), [1, 2], 8, prompts(target, 2, 0), TOKENS, 1)
    rows = batch.measure(target, drafter_specs(["ngram+prompt_lookup"]), [2], 8, prompts(target, 2, 0), TOKENS, 1)
    assert [row["batch_size"] for row in rows] == [1, 1, 2, 2]  # what figures are over is measured, asked for or not
    assert rows[0]["over_plain_alone"] == rows[1]["draft_over_first_size"] == 1


def test_drafts_are_counted_and_their_time_shared(target):
    (_, spec), texts, settings = drafter_specs(["ngram"]), prompts(target, 3, 0), GenerationSettings(TOKENS)
    engine = DecodingEngine(target, build_drafter(spec, target, 8))
    steps = [engine.generate(text, settings).target_steps for text in texts]
    alone, together = (batch.CountedBatches(target, spec, 8, size) for size in (1, 3))
    for counted in (alone, together):
        counted.run(texts, settings)
    assert alone.drafts == sum(steps) - len(texts)  # the first step of an answer is its prefill
    assert together.drafts == max(steps) - 1
    assert 0 < alone.shares[0] < 1 and alone.draft_seconds[0] > 0


@pytest.mark.parametrize("part", ["begin", "prompt", "observe", "propose"])
def test_a_draft_is_timed_without_the_prompts_that_were_read(target, monkeypatch, part):
    """Each text has one prompt, and a share of each draft that depends on how many are drafted at once."""
    method = "observe" if part == "prompt" else part
    own = getattr(NgramDrafter, method)

    def slow(drafter, *args):
        of_a_prompt = args[1:] not in ((), (None,))  # the slot that it is in
        if method != "observe" or of_a_prompt == (part == "prompt"):
            time.sleep(0.2 if part == "prompt" else 0.02)
        return own(drafter, *args)

    monkeypatch.setattr(NgramDrafter, method, slow)
    (_, spec), texts = drafter_specs(["ngram"]), prompts(target, 3, 0)
    counted = batch.CountedBatches(target, spec, 8, 1)
    counted.run(texts, GenerationSettings(TOKENS))
    assert (counted.draft_seconds[0] > 0.008) == (part in ("observe", "propose"))


def test_answers_of_one_token_need_no_draft(target):
    """The prefill gives an answer's first token."""
    rows = batch.measure(target, drafter_specs(["ngram"]), [1, 2], 8, prompts(target, 2, 0), 1, 1)
    assert [row["beta"] for row in rows] == 4 * [1] and [row["draft_share"] for row in rows] == 4 * [0]


def test_a_device_that_drafts_beside_the_host_has_no_time_of_a_draft(target, monkeypatch, capsys):
    init = batch.CountedBatches.__init__

    def beside(counted, *args):
        init(counted, *args)
        counted._on_cpu = False

    monkeypatch.setattr(batch.CountedBatches, "__init__", beside)
    rows = batch.measure(target, drafter_specs(["ngram"]), [2], 8, prompts(target, 2, 0), TOKENS, 1)
    assert [row["draft_share"] for row in rows] == [row["draft_over_first_size"] for row in rows] == 4 * [None]
