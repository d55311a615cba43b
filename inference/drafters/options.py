"""Drafters' options: one dataclass per drafter, made from keywords in Python or from the words of a command line."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch

from draft_heads.configs.options import check_number, check_options, check_whole, option, option_names, value_types

logger = logging.getLogger(__name__)

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
    tuned = _tuned_values(kind, options_type, words["tuned"]) if "tuned" in words else {}
    options = options_type(**{**defaults, **tuned, **given})
    known = "max_nodes" in {**defaults, **given}  # else --max_nodes is not read yet
    if known and isinstance(options, TreeOptions) and given.get("k", 0) > options.max_nodes:
        raise ValueError(
            f"a draft of k={given['k']} tokens has as many nodes; got max_nodes={options.max_nodes}; lower k, or raise "
            f"--max_nodes, for this drafter alone with max_nodes={given['k']}"
        )
    return options


def _value(name: str, hint: Any, text: str) -> Any:
    """One option's value, of the first type of its annotation."""
    to_type = value_types(hint)[0]
    try:
        return to_type(text)
    except ValueError:
        number = "a whole number; got {!r}; write for example 12" if to_type is int else "a number; got {!r}; write 0.7"
        raise ValueError(f"drafter option {name} must be {number.format(text)}") from None


def _tuned_values(kind: str, options_type: type[DrafterOptions], path: str) -> dict[str, Any]:
    """The values that the option tuned=FILE reads from a tuning script's file."""
    hints = get_type_hints(options_type)
    types = {name: value_types(hints[name])[0] for name in options_type.tuned}
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, to_type in types.items():
            (check_whole if to_type is int else check_number)(name, values[name])
        tuned = {name: to_type(values[name]) for name, to_type in types.items()}
        made_for_kind = values.get(MADE_FOR, {}).get("kind", kind)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"tuned= needs a file of {options_type.tuned_by} with {' and '.join(types)}; {path} is not one ({error})"
        ) from None
    if made_for_kind != kind:
        raise _tuned_for_another("kind of drafter", path, made_for_kind, kind)
    return tuned


# ---- what a file of tuned= was made for --------------------------------------------------------------------------

MADE_FOR = "made_for"
"""The key of a tuning script's file under which `made_for` stands."""


def made_for(kind: str, loaded: str, loaded_hash: str, target: Any) -> dict[str, Any]:
    """What a drafter was tuned for.

    loaded  the path of its head or draft model; loaded_hash: the `weights_hash` of it; target: the `Target`
    """
    device = target.device
    processor = f"{platform.machine()} with {torch.get_num_threads()} threads"
    return {
        "kind": kind,
        "loaded": loaded,
        "loaded_weights_hash": loaded_hash,
        "target": target.name,
        "target_weights_hash": target.fingerprint()["weights_hash"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
    }


def check_made_for(path: str, now: Mapping[str, Any]) -> None:
    """ValueError for a file of tuned= that was made for another head, draft model or target than what is used `now`; a
    line for one that was made on another device, and for one of an older version, which does not say for what."""
    known = json.loads(Path(path).read_text(encoding="utf-8")).get(MADE_FOR)
    if known is None:
        logger.info(f"{path} does not say for which drafter and target it was tuned; it is used as it is")
        return
    for name, what in (("loaded", "head or draft model"), ("target", "target")):
        if known.get(f"{name}_weights_hash") != now[f"{name}_weights_hash"]:
            raise _tuned_for_another(what, path, known.get(name), f"{now[name]}, of other weights")
    device = now["device"] if " with " in str(known.get("device")) else now["device"].partition(" with ")[0]
    if known.get("device") != device:  # older versions do not say how many threads
        logger.info(f"{path} was tuned on {known.get('device')}, this is {now['device']}: other settings may be faster")


def _tuned_for_another(what: str, path: str, known: Any, now: str) -> ValueError:
    return ValueError(
        f"a file of tuned= must be made for the same {what}; {path} was made for {known}; got {now}; tune again for "
        "this one, or leave tuned= out"
    )
