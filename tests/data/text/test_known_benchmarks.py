"""Benchmarks by name, in their published forms, and what describes another; all rows here are made up."""

import gzip
import http.server
import json
import re
import threading
from dataclasses import replace

import datasets
import pytest

from draft_heads.data.text import known_benchmarks as known
from draft_heads.data.text.benchmarks import BenchmarkError, CodeTask, load_benchmark
from draft_heads.scripts.decoding_options import parse_benchmarks
from tests.running import ROOT

NAMES = ["alpaca", "cnn_dm", "gsm8k", "humaneval", "mbpp", "mt_bench", "spec_bench", "vicuna_bench", "wmt16", "xsum"]
ADD = {"task_id": "T/0", "prompt": 'def add(a, b):\n    """Sum."""\n', "canonical_solution": "    return a + b\n"}
ADD |= {"entry_point": "add", "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"}
PUBLISHED = {
    "alpaca": {"instruction": "Name a fruit.", "input": "", "output": "An apple.", "text": "### Name a fruit."},
    "cnn_dm": {"article": "A cat sat.", "highlights": "Cat sits.\nMat happy.", "id": "f00"},
    "gsm8k": {"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"},
    "humaneval": ADD,
    "mbpp": {
        **{"task_id": 11, "text": "Write add.", "code": "def add(): …", "test_list": ["assert a", "assert b"]},
        **{"test_setup_code": "", "challenge_test_list": []},
    },
    "mt_bench": {"prompt": ["One?", "Two?"], "prompt_id": 7, "category": "math", "reference": []},
    "spec_bench": {"question_id": 1, "category": "rag", "turns": ["Why?"], "reference": [["a", "b"]]},
    "vicuna_bench": {"question_id": 1, "category": "generic", "turns": ["Why?"]},
    "wmt16": {"translation": {"de": "Eine {Katze}.", "en": "A cat."}},
    "xsum": {"document": "A cat sat.", "summary": "Cat sits.", "id": "42"},
}
"""A row as it is published, of each benchmark."""


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_these_benchmarks_are_known_and_each_reads_its_published_form(tmp_path):
    assert list(known.known_benchmarks()) == NAMES == sorted(PUBLISHED)
    found = {}
    for name, row in PUBLISHED.items():
        for given in (name, "mine"):  # the form follows from the rows, whatever the file is called
            (found[given, name],) = load_benchmark(given, write(tmp_path / "q.jsonl", row))
        assert replace(found["mine", name], column=None) == replace(found[name, name], column=None)
    found = {name: found[name, name] for name in NAMES}
    assert {name: one.score for name, one in found.items() if one.score} == {
        **{"cnn_dm": "rouge2", "gsm8k": "accuracy"},
        **{"humaneval": "pass_at_1", "xsum": "rouge2"},
    }
    assert found["alpaca"].turns == ["Name a fruit."] and found["mt_bench"].turns == ["One?", "Two?"]
    assert found["cnn_dm"].turns == ["Summarise this news article in three or four short sentences.\n\nA cat sat."]
    assert found["xsum"].turns == ["Summarise this news article in one sentence.\n\nA cat sat."]
    assert found["mbpp"].turns == ["Write add.\n\nYour code should pass these tests:\nassert a\nassert b"]
    assert (found["mbpp"].question_id, found["wmt16"].reference) == (11, "A cat.")
    assert found["wmt16"].turns == ["Translate this German text into English.\n\nEine {Katze}."]
    assert (found["cnn_dm"].reference, found["cnn_dm"].question_id) == ("Cat sits.\nMat happy.", "f00")
    assert (found["mt_bench"].question_id, found["mt_bench"].group, found["spec_bench"].group) == (7, "math", "RAG")
    assert found["humaneval"].code == CodeTask(ADD["prompt"], "add", ADD["test"])


def test_an_input_is_a_paragraph_of_its_own_and_braces_of_a_row_stay(tmp_path):
    row = {"instruction": "Add {input}.", "input": "{1, 2}", "output": ""}
    (question,) = load_benchmark("alpaca", write(tmp_path / "q.jsonl", row))
    assert question.turns == ["Add {input}.\n\n{1, 2}"] and question.score is None


def test_keys_with_spaces_and_signs_are_filled_in_and_formats_are_refused(tmp_path):
    """As the headers of CSV files; LaTeX and JSON stay."""
    row = {"Question": "Why?", "Input Text": "It rained.", "input-text": "Wet.", "a.b (c)": "d"}
    write(tmp_path / "q.jsonl", row)

    def described(prompt, *keys):
        text = {"source": "q.jsonl", "keys": ["Question", *keys], "unread": [*row], "prompt": prompt}
        (tmp_path / "mine.yaml").write_text(json.dumps(text))
        return known.read_description(tmp_path / "mine.yaml")

    signs = '{"x": 1} {x + 1} \\boxed{final answer} {Question: TEXT, reason: TEXT} {yes or no}'
    described("{Question} {Input Text} {input-text} {a.b (c)} " + signs, *[*row][1:])
    (question,) = load_benchmark("mine", str(tmp_path / "mine.yaml"))
    assert question.turns == [f"Why? It rained. Wet. d {signs}"]
    for wrong, right in (
        ("Question!r", "Question"), ("Question:>9", "Question"), (" Question ", "Question"),
        ("Question[0]", "Question"), ("Question|upper", "Question"),
        ("input text", "Input Text"), (" Input Text:>4", "Input Text"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(f"received {{{wrong}}}; write {{{right}}}, or ")):
            described(f"{{Question}} {{{wrong}}}", *[*row][1:])
    assert described("{Question} {question}", "question").placeholder.findall("{question}") == ["question"]
    with pytest.raises(ValueError, match=r"each \{KEY\} of prompt is in keys or optional; 'answer' is not: add it"):
        described("{Question} {answer}")


@pytest.mark.parametrize(("value", "asked"), [(0, "Add.\n\n0"), (False, "Add.\n\nFalse"), ("", "Add."), ([], "Add.")])
def test_only_what_holds_no_text_is_left_out_of_a_prompt(tmp_path, value, asked):
    row = {"instruction": "Add.", "input": value, "output": "0"}
    (question,) = load_benchmark("alpaca", write(tmp_path / "q.jsonl", row))
    assert question.turns == [asked]


GENERIC = {
    "humaneval": {"task_id": "q1", "prompt": "What is the capital of France?"},
    "mbpp": {"text": "What does this function do?", "code": "def f(x): return x*2"},
    "xsum": {"document": "The tenant pays monthly.", "summary": "Rent is due monthly."},
}
"""Rows with keys of a benchmark that other files have too."""


@pytest.mark.parametrize("name", GENERIC)
def test_keys_that_other_files_have_too_make_no_benchmark_of_a_file_that_is_not_named_so(tmp_path, name):
    file, keys = write(tmp_path / "q.jsonl", GENERIC[name]), ", ".join(GENERIC[name])
    with pytest.raises(BenchmarkError, match=rf"received the keys: {keys}; write .* or describe the file"):
        load_benchmark("mine", file)
    (question,) = load_benchmark(name, file)  # who names it means it
    assert {"humaneval": "Complete this Python", "mbpp": "What does", "xsum": "Summarise"}[name] in question.turns[0]


def test_the_tasks_of_spec_bench_are_its_columns(tmp_path):
    tasks = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
    tasks += ["translation", "summarization", "qa", "math_reasoning", "rag", "another"]
    rows = [{"question_id": number, "category": task, "turns": ["a"]} for number, task in enumerate(tasks)]
    found = load_benchmark("spec_bench", write(tmp_path / "q.jsonl", *rows))
    columns = [*["multi-turn"] * 8, "translation", "summarisation", "QA", "math", "RAG", "another"]
    assert [question.group for question in found] == columns
    assert [question.category for question in found] == tasks  # as answer files keep it
    assert [question.group for question in load_benchmark("mine", write(tmp_path / "q.jsonl", *rows))] == tasks


def test_a_name_alone_reads_the_hub_with_its_configuration(tmp_path, monkeypatch):
    """The hub's dataset as a local copy of its repository: parquet files, the configurations in README.md."""
    for part, row in (("main", PUBLISHED["gsm8k"]), ("socratic", PUBLISHED["gsm8k"] | {"question": "wrong part"})):
        for split in ("train", "test"):
            rows = datasets.Dataset.from_list([row | {"question": f"{split}: {row['question']}"}])
            rows.to_parquet(tmp_path / "copy" / part / f"{split}-00000.parquet")
    parts = [
        f"- config_name: {part}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {part}/{split}-*\n" for split in ("train", "test"))
        for part in ("main", "socratic")
    ]
    (tmp_path / "copy" / "README.md").write_text(f"---\nconfigs:\n{''.join(parts)}---\n")
    own = (known.FOLDER / "gsm8k.yaml").read_text()
    assert "source: openai/gsm8k\n" in own
    (tmp_path / "gsm8k.yaml").write_text(own.replace("openai/gsm8k", "copy"))
    monkeypatch.setattr(known, "FOLDER", tmp_path)
    monkeypatch.setattr(known, "known_benchmarks", known.known_benchmarks.__wrapped__)  # other tests share the cache
    ((name, source),) = parse_benchmarks(["gsm8k"]).items()
    assert [question.turns for question in load_benchmark(name, source)] == [["test: 2 + 2?"]]


def test_the_split_of_a_description_is_its_own_source_and_may_be_lacking_in_a_copy(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "2 + 2?"}])})
    for place in ("own/set", "copy"):
        saved.save_to_disk(tmp_path / place)
    (tmp_path / "mine.yaml").write_text("source: own/set\nsplit: validation\nkeys: [text]\nprompt: '{text}'\n")
    with pytest.raises(ValueError, match="own/set has no split 'validation'; it has: train"):
        load_benchmark("mine", "mine.yaml")
    described = known.describe("mine", "mine.yaml")[0]
    monkeypatch.setattr("draft_heads.data.text.benchmarks.describe", lambda name, source: (described, source))
    assert [question.turns for question in load_benchmark("mine", "copy")] == [["2 + 2?"]]
    assert "copy has no split validation: its split train is read" in caplog.text


def test_rows_without_the_keys_of_a_description_of_ones_own_are_refused(tmp_path):
    """They have the form of a known benchmark, whose prompt is another."""
    write(tmp_path / "q.jsonl", {"question": "2 + 2?", "answer": "4", "level": None})
    lines = ["source: q.jsonl", "keys: [question, answer, level]", "prompt: 'Only a number. {question}'"]
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, "reference: answer"]))
    with pytest.raises(ValueError, match=r"keys of its description, question, answer, level; this has no level: name"):
        load_benchmark("mine", str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, "reference: answer"]).replace(", level]", "]"))
    (found,) = load_benchmark("mine", str(tmp_path / "mine.yaml"))
    assert found.turns == ["Only a number. 2 + 2?"]


def test_a_score_that_a_description_of_ones_own_asks_for_needs_the_rows_keys(tmp_path):
    row = {"task": "Add one.", "prompt": "def f(x):", "tests": "assert f(1) == 2"}
    write(tmp_path / "q.jsonl", row)
    lines = ["source: q.jsonl", "keys: [task]", "prompt: '{task}'", "score: pass_at_1", "unread: [prompt, tests]"]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"'entry_point' is a non-empty text"):
        load_benchmark("mine", str(tmp_path / "mine.yaml"))


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch):
    asked = []

    def unreachable(source, name, **_):
        asked.append((source, name))
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name in NAMES:
        source = known.known_benchmarks()[name].source
        if not source.startswith("https://"):
            with pytest.raises(ValueError, match=rf"{source} is no local file, and the hub cannot be reached"):
                load_benchmark(*next(iter(parse_benchmarks([name]).items())))
    assert ("abisee/cnn_dailymail", "3.0.0") in asked and ("openai/gsm8k", "main") in asked
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        load_benchmark("mine", "openai/gsm8k")
    assert asked[-1] == ("openai/gsm8k", "main")  # under any name


@pytest.fixture
def server(tmp_path):
    """The address of a web server of the files in tmp_path."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_file_is_read_by_its_address(tmp_path, server):
    write(tmp_path / "q.jsonl", PUBLISHED["spec_bench"], PUBLISHED["spec_bench"] | {"question_id": 2})
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress((tmp_path / "q.jsonl").read_bytes()))
    for file in ("q.jsonl", "q.jsonl.gz"):
        assert len(load_benchmark("spec_bench", f"{server}/{file}")) == 2
    with pytest.raises(ValueError, match=r"absent\.jsonl cannot be read \(HTTP Error 404: .*copy the file here"):
        load_benchmark("spec_bench", f"{server}/absent.jsonl")
    with pytest.raises(BenchmarkError, match=rf"{server}/bad\.jsonl, row 1: a row is an object, received int"):
        write(tmp_path / "bad.jsonl", [3]) and load_benchmark("spec_bench", f"{server}/bad.jsonl")


def test_one_small_file_describes_another_benchmark(tmp_path):
    write(tmp_path / "riddles.jsonl", {"riddle": "What has keys?", "hint": "Music.", "solution": "4", "kind": "easy"})
    (tmp_path / "riddles.yaml").write_text(
        'source: riddles.jsonl\nkeys: [riddle, solution]\noptional: [hint]\nprompt: "Solve: {riddle}\\n\\n{hint}"\n'
        "reference: solution\nscore: accuracy\n"
    )
    assert parse_benchmarks([str(tmp_path / "riddles.yaml")]) == {"riddles": str(tmp_path / "riddles.yaml")}
    assert parse_benchmarks([f"qa={tmp_path}/riddles.yaml"]) == {"qa": f"{tmp_path}/riddles.yaml"}
    (tmp_path / "a=b.yaml").write_text("source: riddles.jsonl")
    assert parse_benchmarks([f"{tmp_path}/a=b.yaml"]) == {"a=b": f"{tmp_path}/a=b.yaml"}
    for name in ("riddles", "other"):
        (question,) = load_benchmark(name, str(tmp_path / "riddles.yaml"))
        assert (question.turns, question.reference, question.score) == (
            ["Solve: What has keys?\n\nMusic."],
            "4",
            "accuracy",
        )


def test_a_row_of_which_nothing_is_asked_is_refused(tmp_path):
    write(tmp_path / "rows.jsonl", {"hint": "", "more": []})
    (tmp_path / "own.yaml").write_text('source: rows.jsonl\noptional: [hint, more]\nprompt: "{hint}\\n\\n{more}"\n')
    with pytest.raises(BenchmarkError, match="line 1: a question needs a text; hint and more are empty; leave it out"):
        load_benchmark("own", str(tmp_path / "own.yaml"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("config: main", "source is required, received only config"),
        ("source: a\nsplits: b", "unknown splits; valid keys: source, config, "),
        ("source: a\nsplit: 3", "split is a text, received 3; put it in quotes"),
        ("source: a\nkeys: b", "keys is a list of texts, received 'b'"),
        ("source: a\nscore: rouge2", "score is of rows that a prompt is made from"),
        (
            'source: a\nkeys: [q]\noptional: [hint]\nprompt: "Solve.\\n\\nQuestion: {q}\\nContext: {hint}"',
            "a paragraph of prompt is left out with its optional key, received 'hint' beside 'q'; put an empty line",
        ),
        ("source: a\nkeys: [q]\nprompt: '{r}'", r"each \{KEY\} of prompt is in keys or optional; 'r' is not"),
        ("source: a\nkeys: [q]\nprompt: Why?", r"prompt has a \{KEY\} of the row"),
        (
            "source: a\nkeys: [q]\nprompt: '{q}'\nscore: bleu",
            "score is one of accuracy, rouge2, pass_at_1, received 'bleu'",
        ),
        ("source: a\nkeys: [q]\nprompt: '{q}'\nscore: rouge2", "the score rouge2 needs reference"),
        ("source: a\ncolumns: {m: math}", "columns maps names to lists of categories"),
        ("source: a\ncolumns: {m: [math], n: [math]}", "a category is in one of the columns"),
        ("- a", "maps keys to values, received list"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_bad_description_is_named_with_the_rule(tmp_path, text, reason):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"own\.yaml:? {reason}"):
        load_benchmark("own", str(tmp_path / "own.yaml"))
    with pytest.raises(ValueError, match=r"absent\.yaml cannot be read"):
        load_benchmark("own", str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gsm8k", {"answer": "four"}, "the answer of a GSM8K problem ends with its number"),
        ("cnn_dm", {"highlights": ""}, "'highlights' is a non-empty text, received"),
        ("xsum", {"document": None}, "'document' is a non-empty text, received nothing"),
        ("humaneval", {"test": None}, "'test' is a non-empty text, received nothing"),
        ("alpaca", {"instruction": 3}, "'instruction' is a non-empty text, received int '3'"),
        ("alpaca", {"persona": "a pirate"}, "the key 'persona' is unknown; take it out"),
    ],
)
def test_a_bad_row_is_named_by_line(tmp_path, name, change, reason):
    file = write(tmp_path / "q.jsonl", PUBLISHED[name], PUBLISHED[name] | {"task_id": "T/1", "id": "b"} | change)
    with pytest.raises(BenchmarkError, match=rf"q\.jsonl, line 2: {reason}"):
        load_benchmark(name, file)


def test_an_unknown_name_and_an_unknown_form_list_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=rf"or a known name alone: {', '.join(NAMES)}; got 'gsm8'"):
        parse_benchmarks(["gsm8"])
    with pytest.raises(ValueError, match="'gsm8k' is given twice"):
        parse_benchmarks(["gsm8k", "gsm8k=a.jsonl"])
    with pytest.raises(ValueError, match="benchmarks must have different names, 'q' and 'Q' differ only in case; ren"):
        parse_benchmarks(["q=a.jsonl", "Q=a.jsonl"])
    with pytest.raises(BenchmarkError, match=r"'article' and 'highlights' \(cnn_dm\).*received the keys: text"):
        load_benchmark("cnn_dm", write(tmp_path / "q.jsonl", {"text": "a"}))


def test_the_guide_lists_every_known_benchmark():
    guide = (ROOT / "docs/decoding.md").read_text(encoding="utf-8")
    for name, one in known.known_benchmarks().items():
        (row,) = re.findall(rf"^\| `{name}` \|.*", guide, re.MULTILINE)
        assert one.source.split("/main/")[0].removeprefix("https://raw.githubusercontent.com/") in row
        assert {"accuracy": "accuracy", "rouge2": "ROUGE-2", "pass_at_1": "pass@1", None: "–"}[one.score] in row
