"""`scripts/replay.py` from its command line, on the embedded target's tokenizer."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_heads.data.text.chat_template import load_chat_tokenizer
from draft_heads.inference.evaluation.answer_files import Answer
from draft_heads.inference.evaluation.comparison import differences, read_reports
from draft_heads.inference.target.target import Target
from draft_heads.scripts import build_datastore, evaluate, replay
from tests.inference.models import make_head

TINY = "tests/tiny_target"
ANSWERS = ["One apple and one apple are two apples.", "Two apples and two apples are four apples."]


def answer(question_id, texts, tokenizer):
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts]
    choice = {"turns": texts, "idxs": [count - 1 for count in counts], "new_tokens": counts}
    choice["wall_time"] = [1.0] * len(texts)
    return {"question_id": question_id, "choices": [choice]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def command(tmp_path):
    tokenizer = load_chat_tokenizer(TINY)
    answers = [answer(3, ANSWERS, tokenizer), answer(4, ANSWERS[1:], tokenizer)]
    questions = [
        {"question_id": 4, "category": "math", "turns": ["How many are two and two?"]},
        {"question_id": 3, "category": "writing", "turns": ["Write of apples.", "Write of more apples."]},
    ]
    chats = [{"conversations": [{"from": "human", "value": "Apples?"}, {"from": "gpt", "value": ANSWERS[1]}]}]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    store = str(tmp_path / "store")
    assert (
        build_datastore.main(["--dataset", str(tmp_path / "chats.json"), "--tokenizer", TINY, "--output", store]) == 0
    )
    return {
        "--answers": [write(tmp_path / "recorded.jsonl", answers)],
        "--questions": [write(tmp_path / "questions.jsonl", questions)],
        "--tokenizer": [TINY],
        "--drafters": ["vanilla", "ngram", "tree=ngram,branches=2", "prompt_lookup", f"rest={store}"],
        "--output": [str(tmp_path / "out")],
    }


def run(command, **changes):
    words = command | {f"--{name}": value for name, value in changes.items()}
    return replay.main([word for flag, values in words.items() if values is not None for word in (flag, *values)])


def test_the_folder_holds_the_report(command, tmp_path, capsys):
    assert run(command) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["target"] is None
    assert report["settings"]["answers"] == "recorded.jsonl"
    assert report["settings"]["max_new_tokens"] is None
    rows = {(row["category"], row["drafter"]): row for row in report["results"]}
    assert {row["benchmark"] for row in rows.values()} == {"recorded"}
    assert {category for category, _ in rows} == {None, "writing", "math"}
    for row in rows.values():
        assert [row[key] for key in ("gamma", "lossless", "wall_seconds")] == [None] * 3
        assert row["beta"] == row["new_tokens"] / row["target_steps"]
    assert rows[None, "vanilla"]["beta"] == 1.0
    assert rows[None, "ngram"]["beta"] > 1.1
    assert rows["math", "rest"]["beta"] > rows["math", "ngram"]["beta"]  # its datastore holds that answer
    assert rows[None, "ngram"]["questions"] == 2 and rows[None, "ngram"]["turns"] == 3
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| benchmark | drafter | β | new tokens | target steps |" in text
    assert "| category | vanilla | ngram | tree (ngram) | prompt_lookup | rest |" in text
    assert "×" not in text and "None" not in text
    few = "With fewer than 20 answered turns, β and its interval say little; answered here: recorded 3."
    assert few in text and few in (tmp_path / "out" / "report.html").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "accepted_length.png",
        "report.html",
        "report.json",
        "report.md",
    ]
    assert "recorded.jsonl, replayed" in capsys.readouterr().out


def test_files_that_no_run_wrote_stay(command, tmp_path, capsys):
    own = tmp_path / "out" / "speedup.png"
    (own.parent / "answers").mkdir(parents=True)
    (own.parent / "answers" / "ngram.jsonl").write_text("{}")
    own.write_text("mine")
    assert run(command) == 2
    assert f"{own} is there without a report.json" in capsys.readouterr().err and own.read_text() == "mine"
    own.unlink()
    assert run(command) == 0
    assert (own.parent / "answers" / "ngram.jsonl").read_text() == "{}"  # a replay writes no answers


def test_reports_say_what_was_replayed(command, tmp_path):
    tokenizer = load_chat_tokenizer(TINY)
    other = {"question_id": 3, "turns": ["Write of pears.", "More!"]}
    answers = [answer(3, ANSWERS[::-1], tokenizer)]
    for name in "bcd":
        (tmp_path / name).mkdir()
    asked = [write(tmp_path / "b" / "questions.jsonl", [other])]
    changes = {
        "a": {},
        "b": {"questions": asked},
        "c": {"chat_template": ["vicuna"]},
        "d": {"answers": [write(tmp_path / "d" / "recorded.jsonl", answers)]},
    }
    for name, change in changes.items():
        words = {"drafters": ["ngram"], "limit": ["1"], "output": [str(tmp_path / name / "out")]}
        assert run(command, **(words | change)) == 0
    apart = {
        name: [row[0] for row in differences(read_reports([tmp_path / "a" / "out", tmp_path / name / "out"])).rows]
        for name in "bcd"
    }
    prompts = "prompts: recorded"
    assert apart == {"b": ["questions: recorded", prompts], "c": [prompts, "chat_template"], "d": ["answers_checksum"]}


def test_prompts_of_another_length_than_the_answered_ones_are_told(caplog):
    """A file of another project does not say how long they were: 0."""
    turns = [SimpleNamespace(prompt=(5,) * length) for length in (7, 9, 4, 4)]
    recorded = [
        SimpleNamespace(turns=[SimpleNamespace(prompt_tokens=length) for length in pair]) for pair in ((7, 8), (0, 5))
    ]
    replay.tell_of_other_prompts(recorded, turns)
    assert "2 of 4 prompts have another number of tokens than those that were answered" in caplog.text
    caplog.clear()
    replay.tell_of_other_prompts(recorded[:1], [turns[0], SimpleNamespace(prompt=(5,) * 8)])
    assert not caplog.text


def test_both_pages_have_the_accepted_tokens_by_source(command, tmp_path):
    assert run(command, drafters=["ngram", "both=ngram+prompt_lookup"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    counts = next(row["accepted_by_source"] for row in report["results"] if row["drafter"] == "both")
    cell = ", ".join(f"{name} {count}" for name, count in counts.items())
    for name in ("report.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "Accepted tokens by source" in text and cell in text


def test_without_questions_there_are_no_categories(command, tmp_path):
    assert run(command, questions=None, drafters=["ngram"], limit=["1"]) == 0
    (row,) = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    assert (row["category"], row["questions"], row["turns"]) == (None, 1, 2)


def test_a_template_is_told_of_only_where_it_renders_prompts(command, tmp_path, caplog):
    bare, told = load_chat_tokenizer(TINY), "has no chat template: the bundled vicuna is taken"
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    assert run(command, tokenizer=[str(tmp_path / "bare")], questions=None, drafters=["ngram"]) == 0
    assert told not in caplog.text
    assert run(command, tokenizer=[str(tmp_path / "bare")], drafters=["ngram"], output=[str(tmp_path / "asked")]) == 0
    assert told in caplog.text


def test_gsm8k_problems_are_numbered_from_0(command, tmp_path):
    problems = [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(5)]
    assert run(command, questions=[write(tmp_path / "gsm8k.jsonl", problems)], limit=["1"]) == 2  # two turns, one asked
    tokenizer = load_chat_tokenizer(TINY)
    answers = [write(tmp_path / "gsm.jsonl", [answer(number, ANSWERS[:1], tokenizer) for number in range(6)])]
    assert run(command, questions=[str(tmp_path / "gsm8k.jsonl")], answers=answers, limit=["5"]) == 0


@pytest.mark.parametrize(
    "changes,told",
    [
        ({"drafters": ["ctc=ctc:some/head"]}, "needs the target for a head, which reads its hidden states; 'ctc'"),
        ({"tokenizer": None}, "reads --tokenizer, or that of --target; got neither; give one of them"),
        ({"target": [TINY]}, "reads --tokenizer, or that of --target; got both; give one of them"),
        (
            {"dtype": ["float64"]},
            "--dtype says how --target runs, which is not given; name the target",
        ),
        ({"target": [TINY], "tokenizer": None, "questions": None}, "--target needs the prompts that were answered"),
        ({"drafters": ["ngram", "ngram"]}, "'ngram' is given twice"),
        ({"drafters": None}, "--drafters is required"),
        ({"limit": ["0"]}, "--limit must be at least 1; got 0; write for example 1"),
        ({"tokenizer": ["nowhere"]}, "--tokenizer nowhere is no tokenizer's folder"),
        ({"answers": ["nowhere.jsonl"]}, "nowhere.jsonl: cannot be read"),
        ({"questions": ["nowhere.jsonl"]}, "nowhere.jsonl"),
        ({"questions": ["http://127.0.0.1:9/q.jsonl"]}, "http://127.0.0.1:9/q.jsonl cannot be read"),
        ({"questions": None, "chat_template": ["vicuna"]}, "prompts of --questions, which is not given; got vicuna"),
    ],
)
def test_it_says_what_is_wrong(command, capsys, changes, told):
    assert run(command, **changes) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("own_eos", [False, True])
def test_with_the_target_heads_take_the_steps_of_decoding(tmp_path, own_eos):
    """The answers are those of an evaluation, whose steps of each turn the files have.

    own_eos: the tokenizer's EOS is another than the token that ends a turn, as Gemma's
    """
    trained = "data/tiny_target"  # of another's text the tokens can't be told: bytes of random ones are no characters
    if own_eos:
        tokenizer = AutoTokenizer.from_pretrained(trained)
        tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", repr(tokenizer.eos_token))
        tokenizer.eos_token, trained = "<pad>", shutil.copytree(trained, str(tmp_path / "own"))
        tokenizer.save_pretrained(trained)
    target = Target.from_pretrained(trained, device="cpu")
    for kind, more in (("medusa", {}), ("eagle3", {"target_layers": [1, 2, 3]})):
        head = make_head(target, kind, target_fingerprint=target.fingerprint(), **more)
        head.save_pretrained(tmp_path / kind)
    questions = write(
        tmp_path / "asked.jsonl", [{"question_id": i, "turns": [f"What are {i} apples?"]} for i in (3, 4)]
    )
    drafters = ["ngram", *(f"{kind}={tmp_path / kind}" for kind in ("medusa", "eagle3"))]
    common = ["--target", trained, "--drafters", *drafters, "--max_nodes", "9", "--output"]
    decode = ["--benchmarks", f"asked={questions}", "--max_new_tokens", "48"]
    assert evaluate.main([*common, str(tmp_path / "decoded"), *decode]) == 0
    answers = str(tmp_path / "decoded" / "answers" / "vanilla.jsonl")
    assert replay.main([*common, str(tmp_path / "replayed"), "--answers", answers, "--questions", questions]) == 0
    decoded, replayed = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("decoded", "replayed"))
    steps = [
        {row["drafter"]: (row["new_tokens"], row["accept_length_histogram"]) for row in report["results"]}
        for report in (decoded, replayed)
    ]
    assert steps[1] == {name: row for name, row in steps[0].items() if name != "vanilla"}
    assert (replayed["settings"]["target"], replayed["settings"]["not_greedy"]) == (trained, None)
    told = {key: replayed["settings"][key] for key in ("dtype", "device")}
    assert told == {key: decoded["target"][key] for key in told} == {"dtype": "float32", "device": "cpu"}
    save = AutoModelForCausalLM.from_pretrained(trained)
    with torch.no_grad():
        save.lm_head.weight.mul_(2)  # trained again in place: the same answers, of other weights
    shutil.copytree(trained, tmp_path / "target")
    again = ["--drafters", "ngram", "--answers", answers, "--questions", questions]
    again = ["--target", str(tmp_path / "target"), *again, "--output"]
    assert replay.main([*again, str(tmp_path / "before")]) == 0
    save.save_pretrained(tmp_path / "target")
    assert replay.main([*again, str(tmp_path / "after")]) == 0
    both = [tmp_path / "before", tmp_path / "after"]
    with pytest.raises(
        ValueError, match=r"target \(replayed answers\), of another scales_hash; compare reports of one"
    ):
        read_reports(both)
    assert [row[0] for row in differences(read_reports(both, any_target=True)).rows] == ["target scales_hash"]


def test_the_tokens_of_our_own_files_are_replayed_as_they_were_written(tmp_path, caplog, capsys):
    """Those of a random target, of which a text does not say them: bytes that are no characters.

    Another tokenizer has other tokens for that text, as one with two more entries, and a file may have texts alone.
    """
    asked = [{"question_id": i, "turns": [f"What are {i} apples?", "And two?"]} for i in (3, 4)]
    questions = write(tmp_path / "asked.jsonl", asked)
    decode = ["--drafters", "ngram", "--benchmarks", f"asked={questions}", "--max_new_tokens", "32"]
    assert evaluate.main(["--target", TINY, *decode, "--output", str(tmp_path / "decoded")]) == 0
    answers = tmp_path / "decoded" / "answers" / "vanilla.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]

    def replayed(name, words, answers=answers):
        output, told = tmp_path / name, "written with another tokenizer"
        caplog.clear()
        words = [*words, "--drafters", "ngram", "--answers", str(answers), "--questions", questions]
        assert replay.main([*words, "--output", str(output)]) == 0
        report = json.loads((output / "report.json").read_text())
        (row,) = report["results"]
        return (
            (row["new_tokens"], row["accept_length_histogram"]),
            report["settings"].get("not_greedy"),
            told in caplog.text,
        )

    decoded = json.loads((tmp_path / "decoded" / "report.json").read_text())["results"]
    (row,) = (row for row in decoded if row["drafter"] == "ngram")
    steps = row["new_tokens"], row["accept_length_histogram"]
    assert replayed("same", ["--target", TINY]) == (steps, None, False)
    assert replayed("text_drafters", ["--tokenizer", TINY]) == (steps, None, False)
    grown = AutoTokenizer.from_pretrained(TINY)
    grown.add_tokens(["apples", "bananas"])
    grown.save_pretrained(tmp_path / "grown")
    assert replayed("grown", ["--tokenizer", str(tmp_path / "grown")])[2]
    own = rows[0]["choices"][0]["token_ids_per_turn"]
    rows[0]["choices"][0]["token_ids_per_turn"] = [[*own[0][:-1], 99999], *own[1:]]
    foreign = write(tmp_path / "foreign.jsonl", rows)
    words = ["--target", TINY, "--drafters", "ngram", "--answers", foreign, "--questions", questions]
    assert replay.main([*words, "--output", str(tmp_path / "foreign")]) == 2
    assert f"got 99999 in the answer to question {rows[0]['question_id']}; encode" in capsys.readouterr().err
    for row in rows:
        del row["choices"][0]["token_ids_per_turn"]
    texts = write(tmp_path / "texts.jsonl", rows)
    _, other, told = replayed("texts", ["--target", TINY], texts)
    assert "of 4 answers are not token for token" in other and not told
    for row in rows:
        row["choices"][0]["token_ids_per_turn"] = [[1], [2]]
    cut = write(tmp_path / "cut.jsonl", rows)
    words = ["--tokenizer", TINY, "--drafters", "ngram", "--output", str(tmp_path / "none")]
    assert replay.main([*words, "--answers", cut]) == 2
    assert "token_ids_per_turn must be the new_tokens of each turn; got 1 ids" in capsys.readouterr().err


def test_answers_that_are_not_the_targets_own_are_told(caplog):
    """The names are those that an evaluation under typical acceptance writes into its answer files."""
    answers = [Answer(1, (), model=name) for name in ("ngram", "ctc (LOSSY)", "a (medusa, LOSSY)", None)]
    replay.tell_of_lossy_answers(answers[::3])
    assert not caplog.text
    replay.tell_of_lossy_answers(answers)
    assert "the answers of a (medusa, LOSSY), ctc (LOSSY) are not the target's own" in caplog.text


def test_unanswerable_ids_broken_answers_and_finished_folders_are_refused(command, tmp_path, capsys):
    other = write(tmp_path / "other.jsonl", [{"question_id": 99, "turns": ["?"]}])
    assert run(command, questions=[other]) == 2
    assert "it lacks 3, 4" in capsys.readouterr().err
    broken = write(tmp_path / "broken.jsonl", [{"question_id": 3, "choices": []}])
    assert run(command, answers=[broken]) == 2
    assert "broken.jsonl, line 1: choices must be a list" in capsys.readouterr().err
    assert run(command, drafters=["ngram"]) == 0
    assert run(command, drafters=["ngram"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(command, drafters=["ngram"], overwrite=[]) == 0
