"""Options declared as dataclass fields: default, help text and valid values in one place, from which flags are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

import torch

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}


Rule = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words, and whether it is."""


def option(
    default: Any,
    help: str,
    choices: Sequence[Any] = (),
    least: int | None = None,
    rule: Rule | None = None,
    const: Any = None,
) -> Any:
    """A dataclass field that is a flag; `choices`, `least` and `rule` are checked by `check_options`.

    const: the value of the flag when it is given without one
    """
    if least is not None:
        rule = f"at least {least}", lambda value: value >= least
    limits = {"choices": choices or None, "rule": rule, "const": const}
    metadata = {"help": help, **{name: value for name, value in limits.items() if value is not None}}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_options(options: Any, called: str = "--{}", remedy: str = "leave it out") -> None:
    """ValueError for the first option of a dataclass that is no number its type admits, no choice, or breaks its rule.

    called: how an error writes the name of an option; remedy: what it ends with
    """
    hints, end = get_type_hints(type(options)), f"; {remedy}"
    for f in fields(options):
        if "help" not in f.metadata:
            continue
        name, value, types = called.format(f.name), getattr(options, f.name), value_types(hints[f.name])
        choices, (wanted, holds) = f.metadata.get("choices"), f.metadata.get("rule", ("", lambda value: True))
        if value is None and type(None) in types:
            continue
        if choices and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}{end}")
        if int in types:
            check_whole(name, value, remedy=remedy)
        elif float in types:
            check_number(name, value)
        if not holds(value):
            raise ValueError(f"{name} must be {wanted}; got {value}{end}")


def value_types(hint: Any) -> tuple[Any, ...]:
    """The types of one value: (int,) for int, (int, NoneType) for int | None, the list itself for a list."""
    return (hint,) if get_origin(hint) is list else get_args(hint) or (hint,)


def check_whole(name: str, value: Any, least: int | None = None, remedy: str = "") -> None:
    """ValueError unless a value is a whole number of at least `least`; 12.0, True and "12" are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number; got {value!r}; {remedy or 'write for example 12'}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}; {remedy or f'write for example {least}'}")


def check_number(name: str, value: Any) -> None:
    """ValueError unless a value is a number; nan and the infinities are."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number; got {value!r}; write for example 0.7")


def check_read(given: Any, default_of: Callable[[str], Any], rules: Iterable[tuple[str, str, bool]]) -> None:
    """ValueError for a flag that nothing reads beside the others that are given.

    default_of  a flag's default, before a --config sets another
    rules       flags, another one, whether they are read with or without it
    """
    for names, other, read_with in rules:
        for name in names.split():
            value, state = getattr(given, name), "without" if read_with else "with"
            if value != default_of(name) and bool(getattr(given, other)) != read_with:
                raise ValueError(f"--{name} has no effect {state} --{other}; got {value}; leave it out")


def option_names(options: type) -> list[str]:
    """The fields of a dataclass that are flags: those with a help text."""
    return [f.name for f in fields(options) if "help" in f.metadata]


def add_flags(group: Any, options: type) -> None:
    """One flag for each option of a dataclass, to an argparse parser or group."""
    hints = get_type_hints(options)
    for f in fields(options):
        if "help" not in f.metadata:
            continue
        kind = (get_args(hints[f.name]) or (hints[f.name],))[0]  # int for int, int | None and list[int]
        settings: dict[str, Any] = {"type": true_or_false if kind is bool else kind, "help": f.metadata["help"]}
        settings["default"] = f.default if f.default_factory is MISSING else f.default_factory()
        if get_origin(hints[f.name]) is list:
            settings["nargs"] = "+"
        elif kind is bool or "const" in f.metadata:
            settings |= {"nargs": "?", "const": f.metadata.get("const", True)}
        if "choices" in f.metadata:
            settings["metavar"] = f"{{{','.join(f.metadata['choices'])}}}"
        group.add_argument(f"--{f.name}", **settings)


MOST_THREADS = 1024
THREADS_HELP = "CPU threads of a process; 0: torch's choice, one a core (0)"


def add_threads(parser: Any) -> None:
    """The flag --threads; `use_threads` applies it."""
    parser.add_argument("--threads", type=int, default=0, metavar="N", help=THREADS_HELP)


def use_threads(threads: int) -> None:
    """Let torch compute with so many CPU threads; 0 leaves its choice; ValueError for fewer, or too many."""
    if not 0 <= threads <= MOST_THREADS:
        raise ValueError(f"--threads must be 0 (torch's choice) to {MOST_THREADS}; got {threads}; leave it out")
    if threads:
        torch.set_num_threads(threads)


def out_of_memory(error: BaseException) -> bool:
    """Whether torch had too little memory; only on a GPU its error has a type of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


@contextmanager
def explain_out_of_memory(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Inside, an error of torch for want of memory becomes a ValueError: what ran out of it, and a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ValueError(f"{what} ran out of memory; {remedy()}") from error


def true_or_false(text: str) -> bool:
    """`true`, `yes`, `1`, `false`, `no` or `0` as a boolean, for argparse."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(f"must be true or false; got {text!r}")
    return words[text.lower()]


def dtype_from_name(flag: str, name: str | None) -> torch.dtype | None:
    """The type that the option `flag` names; None for None and `auto`; ValueError for an unknown name."""
    if name in (None, "auto"):
        return None
    if name not in DTYPES:
        raise ValueError(f"{flag} {name} is unknown; pass one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
