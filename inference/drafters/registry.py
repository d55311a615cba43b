"""Builds drafters from the words of a command line: `NAME[=[KIND:]PATH[,key=value…][+…]]`.

`ctc=RUN/head`, `ctc_raw=RUN/head,tree=raw`, `vanilla`: a name, then where it is loaded from and its options. The kind
of a head comes from its checkpoint when it is left out; a name alone is a drafter that loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from heads.checkpoint import load_head, read_config
from heads.ctc import CTCHead
from inference.drafters.base import Drafter
from inference.drafters.ctc import CTCDrafter
from inference.drafters.vanilla import VanillaDrafter
from inference.target import Target


@dataclass(frozen=True)
class DrafterPart:
    """One source of drafts: its kind, the checkpoint it loads ("" for none), its options."""

    kind: str
    path: str = ""
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterSpec:
    """A parsed drafter argument; `name` is what reports call it."""

    name: str
    parts: tuple[DrafterPart, ...]

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Raises ValueError, naming the rule, for a malformed argument."""
        name, equals, rest = text.partition("=")
        if not name or (equals and not rest) or "/" in name:
            raise ValueError(
                f"a drafter is NAME or NAME=[KIND:]PATH[,key=value…][+…]; got {text!r}; write e.g. ctc=runs/ctc/head"
            )
        return cls(name, tuple(cls._part(part, text) for part in (rest or name).split("+")))

    @staticmethod
    def _part(text: str, whole: str) -> DrafterPart:
        place, *pairs = text.split(",")
        options = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise ValueError(f"a drafter's options are key=value; got {pair!r} in {whole!r}")
            options[key] = value
        kind, colon, path = place.partition(":")
        if colon:
            return DrafterPart(kind, path, options)
        if place in DRAFTERS:
            return DrafterPart(place, "", options)
        if (Path(place) / "config.json").is_file() or "/" in place:
            return DrafterPart(str(read_config(place)["kind"]), place, options)
        raise ValueError(
            f"a drafter is one of {', '.join(sorted(DRAFTERS))} or the folder of a head checkpoint; got {place!r} in "
            f"{whole!r}"
        )


def _vanilla(part: DrafterPart, target: Target, max_nodes: int) -> Drafter:
    _take_options(part, {})
    return VanillaDrafter(target.device)


def _ctc(part: DrafterPart, target: Target, max_nodes: int) -> Drafter:
    if not part.path:
        raise ValueError("a ctc drafter needs a trained head: write NAME=RUN/head; got no path")
    options = _take_options(part, {"tree": "prefix", "max_nodes": str(max_nodes)})
    head = load_head(part.path, target.fingerprint()).to(target.device, target.dtype)
    assert isinstance(head, CTCHead)
    return CTCDrafter(head, target, whole_number("max_nodes", options["max_nodes"]), options["tree"])


DRAFTERS: dict[str, Callable[[DrafterPart, Target, int], Drafter]] = {"vanilla": _vanilla, "ctc": _ctc}


def build_drafter(spec: DrafterSpec, target: Target, max_nodes: int = 32) -> Drafter:
    """The drafter a spec describes, on the target's device; ValueError names what is wrong with it."""
    if len(spec.parts) != 1:
        raise ValueError(f"drafter {spec.name!r} composes {len(spec.parts)} sources; give one source per drafter")
    part = spec.parts[0]
    if part.kind not in DRAFTERS:
        raise ValueError(
            f"drafter {spec.name!r} is of kind {part.kind!r}; known kinds are {', '.join(sorted(DRAFTERS))}"
        )
    return DRAFTERS[part.kind](part, target, max_nodes)


def whole_number(key: str, value: str) -> int:
    """An option's value as an integer, or a ValueError naming the option."""
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"drafter option {key} must be a whole number; got {value!r}") from None


def _take_options(part: DrafterPart, defaults: dict[str, str]) -> dict[str, str]:
    unknown = sorted(set(part.options) - set(defaults))
    if unknown:
        raise ValueError(
            f"unknown option {', '.join(unknown)} of a {part.kind} drafter; valid are "
            f"{', '.join(sorted(defaults)) or 'none'}"
        )
    return {**defaults, **part.options}
