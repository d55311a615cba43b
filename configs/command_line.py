"""What all command lines share: flags, `--config FILE.yaml` with defaults for them, errors and Ctrl-C as one line.

Every entry point imports this module before torch, because `choose_wait_policy` must come before OpenMP.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import shlex
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from draft_heads.configs.waiting import choose_wait_policy
from draft_heads.configs.yaml_files import read_yaml

choose_wait_policy(sys.argv[1:])

_NO_SETTINGS = ("config", "print_recipe")
"""Flags that a file of settings cannot give, beside those that print something and exit."""

_TEXTS = ("system", "api_key", "model_name", "served_model_name")
"""Flags whose values are no paths, in which a tilde is a letter."""

_MAY_BE_EMPTY = ("system", "api_key")
"""Flags whose empty text says something, or is refused in words of its own; that of others is a variable of the shell
that has no value, which would count as a flag left out."""

_VALUES = {
    "int": ("a whole number", "write for example 12"),
    "float": ("a number", "write for example 0.7"),
    "str": ("a text", "write a word"),
    "Path": ("a path", "name a file or folder"),
    "true_or_false": ("true or false", "write true or false"),
}
"""The name of a type → what its values are, and a remedy for what is none."""

_REWORDED = (
    (r"invalid (?P<kind>\w+) value: (?P<value>.*)", None),
    (
        r"invalid choice: (?P<value>.*) \(choose from (?P<choices>.*)\)",
        "must be one of {choices}; got {value}; pick one",
    ),
    (r"Truthy value expected: got (?P<value>.*) but .*", "must be true or false; got {value}; write true or false"),
    (
        r"expected (one|at least one|\d+) arguments?",
        "must have a value; got none; write {flag}=VALUE, also one that begins with a dash",
    ),
)
"""What argparse and transformers say behind `argument --flag: ` → what we do; None: by `_VALUES`."""


def _reworded(message: str) -> str:
    """A message of argparse as rule, value received and remedy; others as they are."""
    name, _, said = message.removeprefix("argument ").partition(": ")
    for pattern, ours in _REWORDED:
        if said and (found := re.fullmatch(pattern, said)):
            words = found.groupdict()
            rule, remedy = _VALUES.get(words.get("kind", ""), (f"of type {words.get('kind')}", "write another"))
            flag = name.partition("/")[0]
            return f"{flag} " + (ours or f"must be {rule}; got {{value}}; {remedy}").format(flag=flag, **words)
    return message


def expand_home(text: str) -> str:
    """`--output=~/x`, `mt=~/x.jsonl` and `a=~/h,tuned=~/t.json` with the home folder, which a shell expands at the
    start of a word only."""
    return re.sub(r"(?:^|(?<=[=,+:]))~[^/=,+:\s]*(?=/|$)", lambda found: os.path.expanduser(found[0]), text)  # noqa: PTH111 — leaves unknown users


class OptionParser(argparse.ArgumentParser):
    """Errors are one sentence without the usage; an unknown flag is answered with the known one that is nearest. Of a
    flag that is given twice the last values count; for a list and --config, which lose some, a line says so.

    refused_flag(name): the sentence that answers a flag known elsewhere that is none here, or None
    """

    refused_flag: Callable[[str], str | None] = staticmethod(lambda name: None)
    _given: Counter[str]
    _told: frozenset[str] = frozenset()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = Counter()
        parsed = super().parse_known_args(args, namespace)
        flags = [action for action in self._actions if action.option_strings]
        lists = {a.dest: a.option_strings[0] for a in flags if a.nargs in ("+", "*") or a.dest == "config"}
        for name in lists.keys() - self._told:
            if self._given[name] > 1:
                print(f"warning: {lists[name]} is given twice; only its last values count", file=sys.stderr)
                self._told |= {name}
        return parsed

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._given[action.dest] += 1  # called for each time that a flag is given
        if action.option_strings and any(_is_missing(action, text) for text in arg_strings):
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return super()._get_value(action, arg_string if action.dest in _TEXTS else expand_home(arg_string))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown)
        return options

    def refuse(self, unknown: Sequence[str]) -> None:
        """Exit with status 2 if anything of the command line was not understood."""
        flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        for flag in flags:
            if sentence := self.refused_flag(flag.lstrip("-").replace("-", "_").removeprefix("no_")):
                self.error(sentence)
        if flags:
            near = difflib.get_close_matches(flags[0], self._option_string_actions, 1, cutoff=0.7)
            self.error(f"unknown flag {flags[0]}; {f'did you mean {near[0]}?' if near else '--help lists the flags'}")
        if unknown:
            self.error(f"{unknown[0]!r} belongs to no flag; --help lists the flags")

    def error(self, message: str) -> Any:
        self.exit(2, f"error: {_reworded(message)}\n")


def _is_missing(flag: argparse.Action, text: str) -> bool:
    """Whether a text is empty that stands for a name or a path; numbers have words of their own for that."""
    return not text.strip() and flag.type in (None, str, Path) and flag.dest not in _MAY_BE_EMPTY


def read_config(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Defaults from a YAML mapping; unknown keys are an error that lists the valid ones."""
    try:
        content = read_yaml(path, as_text=True)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read ({error.strerror}); give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    if content is None:  # nothing but comments
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must map flags to values, got {type(content).__name__}")
    return config_values(content, str(path), parser)


def config_values(content: dict[str, Any], name: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Settings converted and checked as flags on the command line would be; `name` is what --config was given."""
    prints = (argparse._HelpAction, argparse._VersionAction)
    flags = {a.dest: a for a in parser._actions if a.dest not in _NO_SETTINGS and not isinstance(a, prints)}
    for key in content:
        if key not in flags and isinstance(parser, OptionParser) and (sentence := parser.refused_flag(str(key))):
            raise ValueError(f"--config {name}: {sentence}")
    if unknown := sorted(str(key) for key in content if key not in flags):
        raise ValueError(f"--config {name}: unknown {', '.join(unknown)}; valid keys: {', '.join(flags)}")
    return {key: _config_value(name, flags[key], value) for key, value in content.items()}


def _config_value(name: str, flag: argparse.Action, value: Any) -> Any:
    """`value` converted and checked as the flag on the command line would be."""
    if value is None and flag.default is not None:
        raise ValueError(f"--config {name}: {flag.dest} has no value; give one, or delete the line")
    if value is None and flag.const is not None:
        raise ValueError(
            f"--config {name}: {flag.dest} without a value could mean the flag alone, which is {flag.const!r}, or "
            f"nothing; write {flag.const}, or delete the line"
        )
    if value is None:
        return None
    if flag.nargs in ("+", "*"):
        if isinstance(value, str) and len(words := value.split()) > 1 and not Path(expand_home(value)).exists():
            raise ValueError(
                f"--config {name}: {flag.dest} must be a list such as [{', '.join(words)}]; got {value!r}; write it so"
            )
        return [_single_value(name, flag, item) for item in (value if isinstance(value, list) else [value])]
    if flag.nargs == 0:
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"--config {name}: {flag.dest} must be true or false; got {value!r}; write one of them")
        return str(value).lower() == "true"
    return _single_value(name, flag, value)


def _single_value(name: str, flag: argparse.Action, value: Any) -> Any:
    kind: Callable[[str], Any] = flag.type if callable(flag.type) else str
    if _is_missing(flag, str(value)):
        raise ValueError(f"--config {name}: {flag.dest} has no value; give one, or delete the line")
    try:
        if value is None or isinstance(value, dict | list):
            raise ValueError
        converted = kind(str(value) if flag.dest in _TEXTS else expand_home(str(value)))
    except (ValueError, argparse.ArgumentTypeError):
        known = "true_or_false" if flag.const is True else getattr(kind, "__name__", str(kind))
        rule, remedy = _VALUES.get(known, (f"of type {known}", "write another"))
        raise ValueError(f"--config {name}: {flag.dest} must be {rule}; got {value!r}; {remedy}") from None
    if flag.choices is not None and converted not in flag.choices:
        valid = ", ".join(map(str, flag.choices))
        raise ValueError(f"--config {name}: {flag.dest} must be one of {valid}; got {value!r}; pick one")
    return converted


def parse_with_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, required: Sequence[str]
) -> argparse.Namespace:
    """Parse flags over the defaults of --config; ValueError for a required flag that is in neither."""
    first, _ = parser.parse_known_args(arguments)
    if first.config is not None:
        parser.set_defaults(**read_config(first.config, parser))
    options = parser.parse_args(arguments)
    for name in required:
        if getattr(options, name) in (None, []):
            raise ValueError(f"--{name} is required; give it on the command line or in --config")
    return options


def own_program() -> list[str]:
    """`-m MODULE` where this process runs a module of the installed package; [] for a script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec is not None and spec.name.startswith("draft_heads.") else []


def own_command() -> str:
    """The command of this process, to be typed again: a module of an installed package runs by its name."""
    program = own_program() or sys.argv[:1]
    count, nodes = os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ.get("GROUP_WORLD_SIZE", "1")
    launcher = ["python"] if count == nodes == "1" else ["torchrun", "--nproc_per_node", count]
    if nodes != "1":
        launcher += ["--nnodes", nodes]
    return shlex.join([*launcher, *program, *sys.argv[1:]])


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends every program, also one that goes on after Ctrl-C."""


def exit_status(run: Callable[[], object]) -> int:
    """Run a script's work: 0, 1 when it returns False, 2 when it cannot run, 130 after Ctrl-C; the reason on stderr,
    of an error that is not foreseen its traceback.

    SIGTERM counts as Ctrl-C: a launcher stops its processes by it. The first of these signals ends the program, so the
    next ones are ignored; a program that goes on after Ctrl-C wraps what Ctrl-C may end in `ends_on_ctrl_c`.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(received: int, _: Any) -> None:
        for number in before:
            signal.signal(number, lambda *_: None)  # a terminal and a launcher may both send one
        raise Terminated if received == signal.SIGTERM else KeyboardInterrupt

    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as it is in the background of a script
                signal.signal(number, stop)
        status = int(run() is False)
        _leave_process_group()
    except Exception as error:  # told whole, and the status says that it failed
        if isinstance(error, ValueError | OSError):
            print(f"error: {' '.join(_sentence(error).split())}", file=sys.stderr)
        else:
            traceback.print_exc()
        status = 2
        _leave_process_group(failed=True)
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\ninterrupted; {str(interrupt) or 'the same command starts again'}", file=sys.stderr)
        return 130  # signals that are still to come change nothing
    for number, handler in before.items():
        signal.signal(number, handler)
    return status


def _sentence(error: Exception) -> str:
    """What an error says, with the remedy where a disk is full."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return str(error)
    place = error.filename or "a file (below TMPDIR, if it is none of this command's own)"
    return f"{place} cannot be written: {error.strerror}; free space there or write elsewhere, and repeat the command"


def _leave_process_group(failed: bool = False) -> None:
    """End what connects the processes of a launcher: its threads, left running, can abort a process that is done.

    failed: the others may be at work, for which NCCL would wait and gloo does not
    """
    distributed = sys.modules.get("torch.distributed")  # which a script that runs alone need not load
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if not failed or distributed.get_world_size() == 1 or distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


@contextmanager
def ends_on_ctrl_c(by_steps: bool = False) -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C ends the block and the program goes on after it, every time; SIGTERM ends the program.

    by_steps: the block works in steps that are to be whole, and ends itself after the one in which the function that
        it is given is true; only a second Ctrl-C ends the block where it is
    """
    before, asked = signal.getsignal(signal.SIGINT), False

    def stop(*_: Any) -> None:
        nonlocal asked
        if asked or not by_steps:
            raise KeyboardInterrupt
        asked = True

    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: asked
    except Terminated:
        raise
    except KeyboardInterrupt:
        return
    finally:
        if not isinstance(sys.exception(), Terminated):  # else the next signals are ignored
            signal.signal(signal.SIGINT, before)


@contextmanager
def on_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """Inside, Ctrl-C ends the program with the line that `message()` gives: what is left, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)(message()) from None
