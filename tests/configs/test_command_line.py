"""What every command line does alike: unknown flags, errors and Ctrl-C as one line."""

import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from draft_heads.configs.command_line import (
    OptionParser,
    Terminated,
    ends_on_ctrl_c,
    exit_status,
    expand_home,
    on_interrupt,
    own_command,
    parse_with_config,
)

import pytest

from draft_heads.configs.options import true_or_false


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--frams", "3"], "error: unknown flag --frams; did you mean --frames?\n"),
        (["--frams=3"], "error: unknown flag --frams; did you mean --frames?\n"),
        (["--frits"], "error: unknown flag --frits; --help lists the flags\n"),
        (["--xyz"], "error: unknown flag --xyz; --help lists the flags\n"),
        (["stray"], "error: 'stray' belongs to no flag; --help lists the flags\n"),
        (["--frames", "x"], "error: --frames must be a whole number; got 'x'; write for example 12\n"),
        (["--rate", "x{}"], "error: --rate must be a number; got 'x{}'; write for example 0.7\n"),
        (
            ["--frames"],
            "error: --frames must have a value; got none; write --frames=VALUE, also one that begins with a dash\n",
        ),
        (
            ["--folder="],
            "error: --folder must have a value; got none; write --folder=VALUE, also one that begins with a dash\n",
        ),
        (
            ["--names", "a", ""],
            "error: --names must have a value; got none; write --names=VALUE, also one that begins with a dash\n",
        ),
        (["--mode", "some"], "error: --mode must be one of 'no', 'steps'; got 'some'; pick one\n"),
        (["--cut", "maybe"], "error: --cut must be true or false; got 'maybe'; write true or false\n"),
        (["-n", "maybe"], "error: -n must be a whole number; got 'maybe'; write for example 12\n"),
    ],
)
def test_a_wrong_flag_is_answered_in_a_sentence(capsys, arguments, told):
    parser = OptionParser()
    parser.add_argument("--frames", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--mode", choices=["no", "steps"])
    parser.add_argument("--cut", type=true_or_false)
    parser.add_argument("-n", "--number", type=int)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(arguments)
    assert stopped.value.code == 2 and capsys.readouterr().err == told


def config_parser():
    parser = OptionParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--drafters", nargs="+")
    parser.add_argument("--layers", nargs="+", type=int)
    parser.add_argument("--list_drafters", action="version", version="table")
    parser.add_argument("--mode", choices=["no", "steps"])
    return parser


def test_values_of_a_file_are_read_as_flags_on_the_command_line_are(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "# a comment\nlimit: 010\noutput: on\nall: true\ndrafters: [a, 1.0, 'null']\nlayers: 3\nmode: no\n"
    )
    options = parse_with_config(config_parser(), [f"--config={tmp_path}/c.yaml"], [])
    words = [*("--limit", "010", "--output", "on", "--all"), *("--drafters", "a", "1.0", "null")]
    words += ["--layers", "3", "--mode", "no"]
    assert vars(options) == {**vars(config_parser().parse_args(words)), "config": tmp_path / "c.yaml"}
    assert (options.limit, options.output) == (10, Path("on"))
    (tmp_path / "c.yaml").write_text("# nothing but a comment\n")
    assert parse_with_config(config_parser(), [f"--config={tmp_path}/c.yaml"], []).limit is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("limit: 1:30", "limit must be a whole number; got '1:30'; write for example 12"),
        ("limit: 3\nlimit: 4", "the key 'limit' twice; keep one"),
        ("layers: 2 4", "layers must be a list such as [2, 4]; got '2 4'; write it so"),
        ("drafters: ngram ctc=x/head", "drafters must be a list such as [ngram, ctc=x/head]; got 'ngram ctc=x/head'"),
        ("drafters: [a, ]\nlayers:\n- 1\n-", "layers must be a whole number; got None; write"),
        ("drafters:\n- a\n-", "drafters must be a text; got None; write a word"),
        ("output: ''", "output has no value; give one, or delete the line"),
        ("drafters: [a, '']", "drafters has no value; give one, or delete the line"),
        ("all: maybe", "all must be true or false; got 'maybe'; write"),
        ("list_drafters: true", "unknown list_drafters; valid keys: limit, "),
        ("help: true", "unknown help"),
        ("[]", "must map flags to values, got list"),
        ("false", "must map flags to values, got str"),
    ],
)
def test_a_file_that_no_command_line_could_be_is_refused(tmp_path, text, told):
    (tmp_path / "c.yaml").write_text(text + "\n")
    with pytest.raises(ValueError, match=rf"^--config .*c\.yaml(?s:.*){re.escape(told)}"):
        parse_with_config(config_parser(), [f"--config={tmp_path}/c.yaml"], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_what_is_kept_and_a_second_signal_changes_nothing(capsys, number):
    def work():
        with on_interrupt(lambda: os.kill(os.getpid(), signal.SIGTERM) or "two shards are done"):
            os.kill(os.getpid(), number)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        assert exit_status(work) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert capsys.readouterr().err == "\ninterrupted; two shards are done\n"


def test_a_program_that_goes_on_is_interrupted_any_number_of_times_and_ended_by_sigterm():
    ended = []

    def work():
        for number in [signal.SIGINT] * 3 + [signal.SIGTERM, signal.SIGINT]:
            with ends_on_ctrl_c(), on_interrupt(lambda: "kept"):
                os.kill(os.getpid(), number)
                ended.append("not reached")
            ended.append(number)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert exit_status(work) == 130
        os.kill(os.getpid(), signal.SIGINT)  # comes while the program ends
        assert ended == [signal.SIGINT] * 3
        with pytest.raises(Terminated), ends_on_ctrl_c():
            raise Terminated
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
            signal.signal(number, handler)


def test_work_by_steps_ends_after_one_or_at_the_second_ctrl_c():
    before, done = signal.signal(signal.SIGINT, signal.default_int_handler), []
    try:
        for signals in (0, 1, 2):
            with ends_on_ctrl_c(by_steps=True) as asked_to_end:
                for step in range(3):
                    for _ in range(signals if step == 1 else 0):
                        os.kill(os.getpid(), signal.SIGINT)
                    done.append(step)
                    if asked_to_end():
                        break
        assert done == [0, 1, 2] + [0, 1] + [0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_told_by_the_first_process_only(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_status(interrupted) == 130
    assert "the same command starts again" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert exit_status(interrupted) == 130 and not capsys.readouterr().err


def test_an_error_is_one_line(capsys):
    def failing():
        raise ValueError("no such\n  folder")

    handler = signal.getsignal(signal.SIGINT)
    assert exit_status(failing) == 2 and capsys.readouterr().err == "error: no such folder\n"
    assert exit_status(lambda: {}["unforeseen"]) == 2  # no result of the work, as 1 is
    told = capsys.readouterr().err
    assert told.startswith("Traceback") and told.endswith("KeyError: 'unforeseen'\n")
    assert exit_status(lambda: False) == 1 and exit_status(lambda: None) == 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_path_after_an_equals_sign_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    parser = OptionParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--drafters", nargs="+")
    given = ["--output=~/x y", "--target=~", "--drafters", "ctc=~/h,tuned=~/t.json", "b=ctc:~/a+~/b", "~/c", "d=~"]
    options = parser.parse_args(given)
    assert (options.output, options.target) == (Path("/home/ada/x y"), "/home/ada")
    expanded = "ctc=/home/ada/h,tuned=/home/ada/t.json b=ctc:/home/ada/a+/home/ada/b /home/ada/c d=/home/ada"
    assert options.drafters == expanded.split()
    (tmp_path / "c.yaml").write_text("output: ~/x\ndrafters: [a=~/h, b]\n")
    options = parse_with_config(parser, [f"--config={tmp_path}/c.yaml", "--target=a~/b"], ["output"])
    assert (options.output, options.drafters) == (Path("/home/ada/x"), ["a=/home/ada/h", "b"])
    assert options.target == "a~/b" and expand_home("x~ ~/y") == "x~ ~/y"  # a tilde elsewhere is a letter


def test_a_tilde_in_a_text_is_a_letter(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    parser = OptionParser()
    parser.add_argument("--config", type=Path)
    for name in ("system", "api_key", "served_model_name", "model_name"):
        parser.add_argument(f"--{name}")
    (tmp_path / "c.yaml").write_text("model_name: ~/m\n")
    given = [
        f"--config={tmp_path}/c.yaml",
        "--system",
        "Set HOME=~/work, A:~",
        "--api_key=abc+~",
        "--served_model_name=~",
    ]
    options = parse_with_config(parser, given, [])
    assert (options.system, options.api_key) == ("Set HOME=~/work, A:~", "abc+~")
    assert (options.served_model_name, options.model_name) == ("~", "~/m")


def test_of_a_flag_that_is_given_twice_the_last_counts_and_a_list_or_config_is_told(tmp_path, capsys):
    def parsed(words):
        parser = OptionParser()
        parser.add_argument("--config", type=Path)
        parser.add_argument("--drafters", nargs="+")
        parser.add_argument("--layers", nargs="*", type=int)
        parser.add_argument("--limit", type=int)
        options = parse_with_config(parser, words.split(), [])
        return options, capsys.readouterr().err

    (tmp_path / "c.yaml").write_text("drafters: [x, y]\nlimit: 4\n")
    config = f"--config {tmp_path}/c.yaml"
    told = "warning: {} is given twice; only its last values count\n"
    options, said = parsed("--drafters a b --limit 3 --drafters c")
    assert (options.drafters, said) == (["c"], told.format("--drafters"))
    assert parsed("--layers 1 --layers")[1] == told.format("--layers")
    assert parsed(f"--config /no/such.yaml {config}")[1] == told.format("--config")
    options, said = parsed(f"--limit 1 {config} --limit 2 --drafters z")
    assert (options.limit, options.drafters, said) == (2, ["z"], "")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("draft_heads.scripts.evaluate", "python -m draft_heads.scripts.evaluate --output 'a b'"),
        ("pytest.__main__", "python scripts/evaluate.py --output 'a b'"),
        (None, "python scripts/evaluate.py --output 'a b'"),
    ],
)
def test_the_command_of_a_report_is_one_to_be_typed_again(monkeypatch, name, told):
    spec = None if name is None else SimpleNamespace(name=name)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec, raising=False)
    monkeypatch.setattr(sys, "argv", ["scripts/evaluate.py", "--output", "a b"])
    assert own_command() == told
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # as torchrun and accelerate launch set it
    assert own_command() == told.replace("python", "torchrun --nproc_per_node 4", 1)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # nodes
    assert own_command() == told.replace("python", "torchrun --nproc_per_node 4 --nnodes 2", 1)


def test_one_path_with_a_blank_is_no_list(tmp_path):
    (tmp_path / "my head").mkdir()
    (tmp_path / "c.yaml").write_text(f"drafters: {tmp_path}/my head\n")
    assert parse_with_config(config_parser(), [f"--config={tmp_path}/c.yaml"], []).drafters == [f"{tmp_path}/my head"]
