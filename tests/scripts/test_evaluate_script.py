"""`scripts/evaluate.py` from its command line, on a random-weight target."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from draft_heads.inference.evaluation import report as reports
from draft_heads.scripts import compare, evaluate, lossless
from draft_heads.scripts import decoding_options as options
from draft_heads.scripts.decoding_options import drafter_specs
from tests.running import on_two_nodes
from tests.scripts.conftest import TEMPLATE
from tests.tiny_chat import save_target


def test_evaluate_writes_the_report_and_says_where(command, tmp_path, capsys):
    assert evaluate.main(command) == 0
    out = tmp_path / "out"
    shown = capsys.readouterr().out
    for name in ("report.json", "report.md", "report.html", "speedup.png", "accepted_length.png", "time_share.png"):
        assert (out / name).is_file()
        assert str(out / name) in shown
    report = json.loads((out / "report.json").read_text())
    assert report["target"]["dtype"] == "float64" and report["samples"] == []  # nothing drafts
    settings = report["settings"]
    assert (settings["max_new_tokens"], [*settings["question_checksums"]]) == (8, ["mt_bench", "sums"])
    rows = {(row["benchmark"], row["category"], row["drafter"]): row for row in report["results"]}
    assert {"vanilla", "plain"} == {name for _, _, name in rows}
    row = rows["mt_bench", None, "plain"]
    assert (row["questions"], row["turns"], row["skipped"]) == (3, 4, 1)
    assert row["beta"] == 1.0 and row["score"] is None  # references that no rule scores
    assert row["lossless"] == {"identical_turns": 4, "turns": 4, "near_ties": 0, "unexplained": 0}
    assert rows["sums", None, "plain"]["score"] == {"accuracy": 0.0}
    assert len((out / "answers" / "plain.jsonl").read_text().splitlines()) == 2 + 4


@pytest.mark.parametrize("drawn", [(), ("--temperature", "0.7", "--stop_at_loops")])
def test_transformers_is_a_baseline_with_a_row_of_its_own(drawn, command, tmp_path):
    rows_of_generate = ["transformers", "hf_lookup=transformers,prompt_lookup=3"]
    assert evaluate.main([*command, "--drafters", "plain=vanilla", *rows_of_generate, *drawn]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {row["drafter"]: row for row in report["results"] if row["benchmark"] == "mt_bench" and not row["category"]}
    assert list(rows) == ["vanilla", "transformers", "hf_lookup", "plain"]
    row, lookup = rows["transformers"], rows["hf_lookup"]
    assert (lookup["lossless"], report["options"]["hf_lookup"]) == (row["lossless"], {"prompt_lookup": "3"})
    shown = [(one["benchmark"], one["drafter"], one["trees"]) for one in report["samples"]]
    assert set(shown) <= {(name, "hf_lookup", None) for name in ("mt_bench", "sums")}  # if it drafted anything
    assert row["lossless"] == {"identical_turns": 4, "turns": 4, "near_ties": 0, "unexplained": 0}
    assert (row["beta"], row["over_transformers"]) == (1.0, 1.0)
    assert row["time_share"] == {"draft": 0.0, "verify": 1.0, "accept": 0.0, "other": 0.0}
    assert row["new_tokens"] == rows["vanilla"]["new_tokens"]
    assert rows["vanilla"]["over_transformers"] == pytest.approx(rows["vanilla"]["gamma"] / row["gamma"])
    assert report["settings"]["plain_loop"] in ("vanilla", "transformers")
    assert rows["vanilla"]["time_share"]["draft"] == 0.0
    assert (tmp_path / "out" / "answers" / "transformers.jsonl").is_file()
    text = (tmp_path / "out" / "report.md").read_text()
    assert "over transformers" in text and "| hf_lookup (transformers) |" in text


def test_a_checkpoint_with_a_penalty_is_checked_against_its_own_generate(command, target, tmp_path, capsys):
    folder, out = tmp_path / "penalised", tmp_path / "out"
    shutil.copytree(target, folder)
    own = {"eos_token_id": 0, "repetition_penalty": 1.3, "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(own))
    assert lossless.main([*command, "--target", str(folder), "--drafters", "ngram"]) == 0
    found = json.loads((out / "lossless.json").read_text())["settings"]
    assert found["own_settings_applied"] == {"repetition_penalty": 1.3}
    assert found["own_settings_not_applied"] == {"do_sample": True, "temperature": 0.6}
    assert (found["end_token_ids"], found["max_positions"]) == ([0], 128)
    assert evaluate.main([*command, "--target", str(folder), "--drafters", "ngram", "--overwrite"]) == 0
    assert "| own_settings_applied | repetition_penalty=1.3 |" in (out / "report.md").read_text()


def test_running_out_of_memory_names_the_options_that_lower_it(command, capsys, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluate, "decode", full)
    assert evaluate.main(command) == 2
    assert "decoding ran out of memory; lower --batch_size or --max_nodes" in capsys.readouterr().err


@pytest.mark.parametrize("after", [0, 5, 8, 9, 10, "picture"])
def test_a_full_disk_is_told_with_its_path_and_the_same_command_goes_on(after, command, tmp_path, capsys, monkeypatch):
    """Whichever file cannot be written: run.json, a group's answers, an answer file, a picture, the report."""
    written = []

    def full(*arguments, **options):
        written.append(arguments)
        if after == "picture" or len(written) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if after == "picture":
            patch.setattr("matplotlib.figure.Figure.savefig", full)
        else:
            patch.setattr("draft_heads.data.common.files.os.fsync", full)
        assert evaluate.main([*command, "--limit", "1"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: {tmp_path}/out/") and "not be written: " in told and "; free s" in told, told
    assert evaluate.main([*command, "--limit", "1"]) == 0


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


def test_questions_that_all_are_too_long_leave_the_folder_to_shorter_ones(command, tmp_path, capsys):
    (tmp_path / "mt.jsonl").write_text(json.dumps({"question_id": 7, "turns": ["long " * 30]}))
    words = command[: command.index(f"sums={tmp_path / 'gsm.jsonl'}")] + ["--max_new_tokens", "8", "--device", "cpu"]
    assert evaluate.main(words) == 2
    assert "none of the 1 questions does; shorten them" in capsys.readouterr().err
    (tmp_path / "mt.jsonl").write_text(json.dumps({"question_id": 7, "turns": ["Hi"]}))
    assert evaluate.main(words) == 0


def test_a_run_does_not_go_on_with_the_target_of_another_folder(command, target, tmp_path, capsys, monkeypatch):
    """Of whose weights a fingerprint sees a few alone."""
    shutil.copytree(target, tmp_path / "tuned")
    weights = bytearray((tmp_path / "tuned/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "tuned/model.safetensors").write_bytes(weights)
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "judge_decoded", interrupted)
        assert evaluate.main(command) == 130
    assert evaluate.main([*command, "--target", str(tmp_path / "tuned")]) == 2
    assert "with other settings (target_files.model.safetensors was '" in capsys.readouterr().err
    assert evaluate.main([*command, "--target", f"{target}/../{target.name}"]) == 0


def test_a_run_that_is_interrupted_as_its_report_is_made_says_that_all_is_kept(command, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "build_report", interrupted)
        assert evaluate.main([*command, "--limit", "1"]) == 130
    assert "2 of 2 groups of questions are kept in" in capsys.readouterr().err.replace("\n", " ")
    assert evaluate.main([*command, "--limit", "1"]) == 0


def test_limit_takes_the_first_questions_of_each_benchmark(command, tmp_path):
    assert evaluate.main([*command, "--limit", "1"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["questions"] for row in report["results"]} == {1}


def test_a_finished_folder_needs_overwrite(command, tmp_path, capsys):
    assert evaluate.main([*command, "--limit", "1"]) == 0
    assert evaluate.main([*command, "--limit", "1"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert evaluate.main([*command, "--target", "absent/absent", "--overwrite"]) == 2
    assert (tmp_path / "out" / "report.json").exists()  # nothing is lost before the new run can start
    assert evaluate.main([*command, "--limit", "2", "--overwrite"]) == 0


def test_a_run_that_ended_while_another_one_loaded_its_target_is_not_replaced(command, tmp_path, capsys, monkeypatch):
    load, report = evaluate.load_target, tmp_path / "out" / "report.json"

    def loads_meanwhile(options):
        report.parent.mkdir(exist_ok=True)
        report.write_text("{}")
        return load(options)

    monkeypatch.setattr(evaluate, "load_target", loads_meanwhile)
    assert evaluate.main([*command, "--limit", "1"]) == 2
    assert "holds a finished run (report.json)" in capsys.readouterr().err
    assert report.read_text() == "{}" and list(report.parent.iterdir()) == [report]
    assert evaluate.main([*command, "--limit", "1", "--overwrite"]) == 0


def test_prompts_of_another_day_are_noted(command, tmp_path, capsys, monkeypatch, caplog):
    """A run that was interrupted the day before is not gone on with, and a comparison says what differs."""

    class Today(datetime):
        day_of_month = 28

        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, cls.day_of_month)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Today)
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d') }}" + TEMPLATE)
    given = [*command, "--chat_template", str(tmp_path / "dated.jinja"), "--limit", "1"]
    folders = [str(tmp_path / name) for name in ("first", "same", "later")]
    for folder, day in zip(folders, (28, 28, 29)):
        Today.day_of_month = day
        assert evaluate.main([*given, "--output", folder]) == 0
    assert "the chat template writes the date into prompts: on another day other ones are asked" in caplog.text
    compare.main(folders[:2])
    assert "The reports have the same target, settings and versions" in capsys.readouterr().out
    compare.main(folders[1:])
    told = capsys.readouterr().out
    assert "| prompts: mt_bench | " in told and "| prompts: sums | " in told and "questions: " not in told

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "judge_decoded", interrupted)
        evaluate.main([*given, "--output", str(tmp_path / "out")])
    Today.day_of_month = 30
    assert evaluate.main([*given, "--output", str(tmp_path / "out")]) == 2
    assert "holds an unfinished run with other settings (prompts.mt_bench was " in capsys.readouterr().err


def test_config_file_gives_defaults_and_flags_win(command, tmp_path):
    (tmp_path / "run.yaml").write_text("max_new_tokens: 3\nlimit: 1\nstop_at_loops: true\nseed: 7\n")
    assert evaluate.main([*command, "--config", str(tmp_path / "run.yaml"), "--seed", "9"]) == 0
    settings = json.loads((tmp_path / "out" / "report.json").read_text())["settings"]
    assert (settings["limit"], settings["stop_at_loops"], settings["seed"]) == (1, True, 9)
    assert settings["max_new_tokens"] == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_tokens: 3", "unknown max_tokens; valid keys: target, "),
        ("limit: many", "limit must be a whole number; got 'many'"),
        ("drafters: [[ngram]]", "drafters must be a text; got ['ngram']"),
        ("overwrite: 1", "overwrite must be true or false; got '1'"),
        ("- limit", "must map flags to values, got list"),
        ("a: [", "is not YAML"),
        ("target: {a: 1}", "target must be a text; got {'a': '1'}"),
    ],
)
def test_a_bad_config_file_is_named(content, message, command, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(content)
    assert evaluate.main([*command, "--config", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert "run.yaml" in error
    assert message in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature must be 0 (greedy) or more, and finite; got -1"),
        (["--top_p", "0.9"], "top_k and top_p need temperature above 0"),
        (["--temperature", "1", "--top_p", "1.5"], "top_p must be above 0 and at most 1"),
        (["--temperature", "1", "--acceptance", "typical"], "got temperature 1; leave it out"),
        (["--limit", "0"], "--limit must be at least 1; got 0; write for example 1"),
        (["--benchmarks", "mt.jsonl"], "--benchmarks takes NAME=FILE, or a known name alone: alpaca, cnn_dm, gsm8k"),
        (["--drafters", "a=vanilla", "a=vanilla"], "'a' is given twice"),
        (["--drafters", "transformers=vanilla"], "got 'transformers=vanilla'; rename the drafter"),
        (["--drafters", "transformers", "transformers"], "'transformers' is given twice; rename one"),
        (["--drafters", "plain=vanilla", "plain=transformers,prompt_lookup=3"], "'plain' is given twice; rename one"),
        (["--drafters", "transformers,prompt_lookup=3"], "write e.g. hf_lookup=transformers,prompt_lookup=10"),
        (["--drafters", "x=transformers,lookup=3"], "got 'x=transformers,lookup=3'; write e.g. hf_lookup="),
        (["--drafters", "x=transformers,prompt_lookup=0"], "1 or more; got '0'; write 10"),
        (
            ["--drafters", "x=transformers,assistant="],
            "have a value each; got none for assistant in 'x=transformers,assistant='",
        ),
        (["--drafters", "transformers=transformers,prompt_lookup=3"], "under another name; got 'transformers=transf"),
        (["--drafters", "a/b=transformers,prompt_lookup=3"], "a drafter is NAME or NAME=[KIND:]PATH[,key=value…][+"),
        (["--drafters", "=transformers,prompt_lookup=3"], "got '=transformers,prompt_lookup=3'; write e.g. ctc="),
        (["--drafters", "ngram a=vanilla"], "got 'ngram a=vanilla'; write e.g. ctc=runs/ctc/head"),
        (["--benchmarks", "gsm8k mt=mt.jsonl"], "got 'gsm8k mt=mt.jsonl'; write for example"),
        (["--drafters", "A=vanilla", "a=transformers,prompt_lookup=3"], "'a' and 'A' differ only in case; rename one"),
        (["--drafters", f"{'n' * 201}=ngram"], "drafters must have names of 200 bytes at most"),
        (["--drafters", f"{'漢' * 23}=ngram"], "has 207"),
        (["--run_code"], "--run_code runs the code of answers (HumanEval); no question asks for any; leave it out"),
        (["--drafters", "x=transformers,assistant=absent/../absent"], "absent/../absent"),
        (["--config", "absent.yaml"], "absent.yaml cannot be read"),
        (["--target", "absent/../absent"], "--target absent/../absent does not exist"),
        (["--target", "tests"], "--target tests is no model's folder"),
        (["--target_adapter", "tests"], "--target_adapter tests cannot be loaded"),
        (["--benchmarks", "q=tests/tiny_target"], "tests/tiny_target, row 1 of split train ("),
        (["--output", "README.md"], "--output must be a folder; a file is in the way"),
        (["--threads", "1000000"], "--threads must be 0 (torch's choice) to 1024"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--drafters", "ngram,k=1,k=2"], "one value each; got k twice"),
    ],
)
def test_bad_flags_are_one_sentence(flags, message, command, capsys):
    assert evaluate.main([*command, *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # behind a progress bar where the target was loaded
    assert error.startswith("error: ")
    assert message in error


def test_vanilla_comes_first_whether_asked_for_or_not():
    assert [spec.name for spec in drafter_specs(["b=vanilla", "vanilla"])] == ["vanilla", "b"]
    assert [spec.name for spec in drafter_specs(["b=vanilla"])] == ["vanilla", "b"]


def test_batches_give_the_answers_of_one_by_one_and_say_their_size(command, tmp_path):
    assert evaluate.main([*command, "--output", str(tmp_path / "one"), "--drafters", "ngram"]) == 0
    assert (
        evaluate.main([*command, "--output", str(tmp_path / "three"), "--drafters", "ngram", "--batch_size", "3"]) == 0
    )
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "three")]
    kept = ("benchmark", "category", "drafter", "turns", "skipped", "new_tokens", "target_steps", "lossless")
    one, three = ([{key: row[key] for key in kept} for row in report["results"]] for report in reports)
    assert one == three and [report["settings"]["batch_size"] for report in reports] == [1, 3]
    assert all((row["wall_seconds"] is None) == bool(row["category"]) for row in reports[1]["results"])
    told = [(tmp_path / name / "report.md").read_text() for name in ("one", "three")]
    assert "95 % interval by bootstrap" in told[0] and "95 % interval by bootstrap" not in told[1]
    assert "β (γ) by category" in told[0] and "β by category" in told[1]


def test_what_a_batch_cannot_have_is_refused(command, tmp_path, capsys):
    out = ["--output", str(tmp_path / "out"), "--batch_size", "2", "--drafters"]
    assert evaluate.main([*command, *out, "transformers"]) == 2
    assert "one answer at a time" in capsys.readouterr().err
    assert evaluate.main([*command, "--output", str(tmp_path / "out"), "--batch_size", "0"]) == 2
    assert "--batch_size must be at least 1" in capsys.readouterr().err


def test_samples_are_of_the_benchmarks_that_are_named(command, tmp_path, capsys):
    drafting = [*command, "--drafters", "ngram", "--limit", "1"]
    assert evaluate.main([*drafting, "--samples_of", "sums"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [one["benchmark"] for one in report["samples"]] == ["sums"]
    assert {row["benchmark"] for row in report["results"]} == {"mt_bench", "sums"}
    assert evaluate.main([*drafting, "--samples_of", "gsm8k", "--overwrite"]) == 2
    assert "--samples_of names benchmarks of --benchmarks, mt_bench, sums; got 'gsm8k'" in capsys.readouterr().err


def rows_without_times(folder):
    speeds = {"wall_seconds", "gamma", "gamma_ci95", "tokens_per_second", "over_transformers"}
    timed = speeds | {"time_share", "verify_cost", "slow_steps"}
    report = json.loads((folder / "report.json").read_text())
    return [{key: value for key, value in row.items() if key not in timed} for row in report["results"]]


KILLED = """
import os, signal, sys
from draft_heads.inference.evaluation.decoded import DecodedFolder
from draft_heads.scripts import evaluate
def put(self, group, part, own=DecodedFolder.put):
    own(self, group, part)
    os.kill(os.getpid(), signal.SIGKILL)
DecodedFolder.put = put
evaluate.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_nodes_that_do_not_share_the_output_folder_are_told_so(command, tmp_path):
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    script = str(Path(evaluate.__file__).resolve())
    for status, told in on_two_nodes([script, *command, "--output", "out"], *nodes):
        assert status == 2 and "--output must be a folder that all nodes share" in told, told


@pytest.mark.slow
def test_two_processes_write_the_report_of_one_also_after_a_kill(command, tmp_path):
    assert evaluate.main([*command, "--output", str(tmp_path / "one")]) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = [*command, "--output", str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "two" / "parts").glob("*-*.json")] == ["mt_bench-00000.json"]
    script = str(Path(evaluate.__file__).resolve())
    done = subprocess.run([*launch, script, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rows_without_times(tmp_path / "two") == rows_without_times(tmp_path / "one")
    assert not (tmp_path / "two" / "parts").exists()
    one, two = (
        [
            json.loads(line)["answer_id"]
            for line in (tmp_path / name / "answers" / "plain.jsonl").read_text().splitlines()
        ]
        for name in ("one", "two")
    )
    assert one == two


def test_what_is_applied_of_the_checkpoints_own_settings_is_said(tmp_path, caplog):
    folder = save_target(tmp_path / "target")
    Path(folder, "generation_config.json").write_text('{"eos_token_id": 2, "repetition_penalty": 1.3}')
    given = ["--drafters", "ngram", "--benchmarks", "a=b", "--output", str(tmp_path / "out"), "--device", "cpu"]
    options.load_target(options.parse_options("", ["--target", folder, *given]))
    assert "ask for repetition_penalty=1.3, which is applied" in caplog.text and "without CUDA graphs" in caplog.text


def test_another_program_machine_or_number_of_devices_does_another_evaluation(tmp_path, monkeypatch):
    """The package's version is the same after a pull, and a compiler that was installed makes a faster program."""
    given = ["--drafters", "ngram", "--benchmarks", "a=b", "--output", str(tmp_path / "out"), "--device", "cpu"]
    chosen = options.parse_options("", ["--target", save_target(tmp_path / "target"), *given])
    target = options.load_target(chosen)
    known = [json.dumps(evaluate.identity(chosen, target, ()))]
    for owner, name, other in (
        (reports, "source_digest", lambda: "another program"),
        (reports, "is_loaded", lambda: None),
        (target, "layer_devices", [torch.device("meta")]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            known.append(json.dumps(evaluate.identity(chosen, target, ())))
    assert len(set(known)) == 4 and json.dumps(evaluate.identity(chosen, target, ())) == known[0]
