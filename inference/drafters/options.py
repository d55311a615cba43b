"""Drafters' options: one dataclass per drafter, made from keywords in Python or from the words of a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from draft_heads.configs.options import check_number, check_options, check_whole, option, option_names, value_types

TUNED_REMEDY = "write it after a head or Ouroboros, as in ctc=RUN/head,tuned=FILE"


@dataclass(frozen=True)
class DrafterOptions:
    """The options of a drafter that has none, and the base of all others, whose fields are made by `option`.

    Fields are checked when an object is made; a rule that relates several is a subclass's `__post_init__`.

    tuned  options that `tuned=FILE` reads from a file written by the script `tuned_by`
    """

    tuned: ClassVar[tuple[str, ...]] = ()
    tuned_by: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self, "drafter option {}", "leave it out for the default")


@dataclass(frozen=True)
class TreeOptions(DrafterOptions):
    """Those of a drafter whose node budget is --max_nodes unless its own option says otherwise."""

    max_nodes: int = option(32, "most nodes of its tree (default: --max_nodes)", least=1)


Options = TypeVar("Options", bound=DrafterOptions)


def read_options(kind: str, options_type: type[Options], words: Mapping[str, str], **defaults: Any) -> Options:
    """The options that a command line gives to a drafter of some kind; ValueError names the rule that they break.

    defaults: values of options that are not given, in place of those that the dataclass declares
    """
    hints = get_type_hints(options_type)
    valid = [*option_names(options_type), *(["tuned"] if options_type.tuned else [])]
    if unknown := sorted(words.keys() - set(valid)):
        if "tuned" in unknown:
            raise ValueError(f"a {kind} drafter takes no tuned=FILE; got tuned={words['tuned']}; {TUNED_REMEDY}")
        raise ValueError(
            f"unknown option {', '.join(unknown)} of a {kind} drafter; valid are {', '.join(sorted(valid)) or 'none'}"
        )
    given = {name: _value(name, hints[name], text) for name, text in words.items() if name != "tuned"}
    tuned = _tuned_values(options_type, words["tuned"]) if "tuned" in words else {}
    return options_type(**{**defaults, **tuned, **given})


def _value(name: str, hint: Any, text: str) -> Any:
    """One option's value, of the first type of its annotation."""
    to_type = value_types(hint)[0]
    try:
        return to_type(text)
    except ValueError:
        number = "a whole number; got {!r}; write for example 12" if to_type is int else "a number; got {!r}; write 0.7"
        raise ValueError(f"drafter option {name} must be {number.format(text)}") from None


def _tuned_values(options_type: type[DrafterOptions], path: str) -> dict[str, Any]:
    """The values that the option tuned=FILE reads from a tuning script's file."""
    hints = get_type_hints(options_type)
    types = {name: value_types(hints[name])[0] for name in options_type.tuned}
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, to_type in types.items():
            (check_whole if to_type is int else check_number)(name, values[name])
        return {name: to_type(values[name]) for name, to_type in types.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"tuned= needs a file of {options_type.tuned_by} with {' and '.join(types)}; {path} is not one ({error})"
        ) from None
