"""Builds drafters from the words of a command line: `NAME[=[KIND:]PATH[,key=value…][+…]]`.

`ctc=RUN/head`, `ctc_raw=RUN/head,tree=raw`, `draft_model=DIR`, `ngram`, `ngram,k=9`, `long=ngram,k=12`: a name, then
where it is loaded from and its options. The kind of a head comes from its checkpoint when it is left out; what else
lies at a path is of the kind its name says, or a draft model. A name alone is a drafter that loads nothing.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import load_head, read_config
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.vanilla import VanillaDrafter
from draft_heads.inference.target.target import Target


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
        if "," in name:  # loads nothing, and has options
            name, rest = name.partition(",")[0], text
        if not name or (equals and not rest) or "/" in name:
            raise ValueError(
                f"a drafter is NAME or NAME=[KIND:]PATH[,key=value…][+…]; got {text!r}; write e.g. ctc=runs/ctc/head"
            )
        return cls(name, tuple(cls._part(part, name, text) for part in (rest or name).split("+")))

    @staticmethod
    def _part(text: str, name: str, whole: str) -> DrafterPart:
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
        if name in FREE_DRAFTERS:
            return DrafterPart(name, place, options)
        if (Path(place) / "config.json").is_file() or "/" in place:
            return DrafterPart(_kind_at(place), place, options)
        raise ValueError(
            f"a drafter is one of {', '.join(sorted(DRAFTERS))} or the folder of a head checkpoint or draft model; got "
            f"{place!r} in {whole!r}"
        )


def _kind_at(place: str) -> str:
    """What lies in a folder: a head of some kind, or a causal language model, which drafts as it is."""
    config = Path(place) / "config.json"
    if config.is_file() and re.search(r'"model_type"\s*:', config.read_text(encoding="utf-8")):
        return "draft_model"
    return str(read_config(place)["kind"])


HEAD_DRAFTERS = {
    "chimera": "draft_heads.inference.drafters.heads.chimera:ChimeraDrafter",
    "ctc": "draft_heads.inference.drafters.heads.ctc:CTCDrafter",
    "hydra": "draft_heads.inference.drafters.heads.hydra:HydraDrafter",
    "medusa": "draft_heads.inference.drafters.heads.medusa:MedusaDrafter",
}
"""Head kind → module and class of its drafter, imported on first use. The class is called with (head, target,
max_nodes, **options) and names its options with their defaults in `options`."""


FREE_DRAFTERS: dict[str, str] = {
    "cascade": "draft_heads.inference.drafters.models.draft_model:CascadeDrafter",
    "draft_model": "draft_heads.inference.drafters.models.draft_model:DraftModelDrafter",
    "ngram": "draft_heads.inference.drafters.text.ngram:NgramDrafter",
    "lookahead": "draft_heads.inference.drafters.text.lookahead:LookaheadDrafter",
    "ouroboros": "draft_heads.inference.drafters.models.ouroboros:OuroborosDrafter",
    "prompt_lookup": "draft_heads.inference.drafters.text.prompt_lookup:PromptLookupDrafter",
    "rest": "draft_heads.inference.drafters.text.rest:RESTDrafter",
    "self_speculative": "draft_heads.inference.drafters.models.self_speculative:SelfSpeculativeDrafter",
}
"""Training-free kind → module and class of its drafter, imported on first use. The class is made by
`from_options(path, target, max_nodes, **options)` and names its options with their defaults in `options`; in `tuned` it
names those that a tuning script finds. A max_nodes of 0 among them asks for as many nodes as the other options need."""


def drafter_for(head: DraftHead, target: Target, max_nodes: int = 32, **options: Any) -> Drafter:
    """The drafter of a head in memory."""
    return drafter_class(head.config.kind)(head, target, max_nodes, **options)


def drafter_class(kind: str) -> Any:
    """The class that drafts with heads of a kind, or without any."""
    module, name = {**HEAD_DRAFTERS, **FREE_DRAFTERS}[kind].split(":")
    return getattr(importlib.import_module(module), name)


def _vanilla(part: DrafterPart, target: Target, max_nodes: int) -> Drafter:
    _take_options(part, {})
    return VanillaDrafter(target.device)


def _head_drafter(part: DrafterPart, target: Target, max_nodes: int) -> Drafter:
    if not part.path:
        raise ValueError(f"a {part.kind} drafter needs a trained head: write NAME=RUN/head; got no path")
    tuned = _tuned(part, "scripts/tune_tree.py", {"max_nodes": int, "tree_temperature": float})
    found = {"max_nodes": tuned.get("max_nodes", max_nodes), **drafter_class(part.kind).options}
    options = _take_options(part, found, also=("tuned",))
    head = load_head(part.path, target.fingerprint()).to(target.device, target.dtype)
    head.config.tree_temperature = tuned.get("tree_temperature", head.config.tree_temperature)
    if head.config.kind != part.kind:
        raise ValueError(
            f"a {part.kind} drafter needs a {part.kind} head; {part.path} holds one of kind {head.config.kind}; leave "
            "the kind out to take the checkpoint's"
        )
    return drafter_for(head, target, **options)


def _free_drafter(part: DrafterPart, target: Target, max_nodes: int) -> Drafter:
    made = drafter_class(part.kind)
    tunable: tuple[str, ...] = getattr(made, "tuned", ())
    tuned = _tuned(part, "scripts/tune_ouroboros.py", dict.fromkeys(tunable, int))
    options = _take_options(part, {"max_nodes": max_nodes, **made.options, **tuned}, also=("tuned",) if tunable else ())
    drafter: Drafter = made.from_options(part.path, target, **options)
    return drafter


DRAFTERS: dict[str, Callable[[DrafterPart, Target, int], Drafter]] = {
    "vanilla": _vanilla,
    **dict.fromkeys(HEAD_DRAFTERS, _head_drafter),
    **dict.fromkeys(FREE_DRAFTERS, _free_drafter),
}


def build_drafter(spec: DrafterSpec, target: Target, max_nodes: int = 32) -> Drafter:
    """The drafter a spec describes, on the target's device; ValueError names what is wrong with it."""
    for part in spec.parts:
        if part.kind not in DRAFTERS:
            raise ValueError(
                f"drafter {spec.name!r} is of kind {part.kind!r}; known kinds are {', '.join(sorted(DRAFTERS))}"
            )
    if len(spec.parts) > 1:
        return _composed(spec, target, max_nodes)
    return DRAFTERS[spec.parts[0].kind](spec.parts[0], target, max_nodes)


def _composed(spec: DrafterSpec, target: Target, max_nodes: int) -> Drafter:
    """Several sources in one tree; options that are the whole's, not a source's, may stand behind any of them."""
    if any(part.kind == "vanilla" for part in spec.parts):
        raise ValueError(f"drafter {spec.name!r} joins vanilla, which drafts nothing, to others; leave it out")
    own = {key: value for part in spec.parts for key, value in part.options.items() if key in HybridDrafter.options}
    whole = _take_options(DrafterPart("hybrid", "", own), HybridDrafter.options)
    parts = [
        replace(part, options={key: value for key, value in part.options.items() if key not in own})
        for part in spec.parts
    ]
    made = [(name, DRAFTERS[part.kind](part, target, max_nodes)) for name, part in zip(part_names(parts), parts)]
    return HybridDrafter(made, target, max_nodes, **whole)


def part_names(parts: Sequence[DrafterPart]) -> list[str]:
    """The kinds of a composed drafter's parts; a second one of a kind is numbered."""
    kinds = [part.kind for part in parts]
    return [
        kind if kind not in kinds[:index] else f"{kind}_{1 + kinds[:index].count(kind)}"
        for index, kind in enumerate(kinds)
    ]


def whole_number(key: str, value: str) -> int:
    """An option's value as an integer, or a ValueError naming the option."""
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"drafter option {key} must be a whole number; got {value!r}") from None


def _as(default: Any, key: str, value: str) -> Any:
    """An option's value as one of the default's type."""
    if isinstance(default, int):
        return whole_number(key, value)
    if not isinstance(default, float):
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"drafter option {key} must be a number; got {value!r}") from None


def _tuned(part: DrafterPart, script: str, values: dict[str, type]) -> dict[str, Any]:
    """The named values of the file that a script wrote, from the option tuned=FILE; empty without it."""
    path = part.options.get("tuned")
    if path is None or not values:
        return {}
    try:
        tuned = json.loads(Path(path).read_text(encoding="utf-8"))
        return {name: kind(tuned[name]) for name, kind in values.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"tuned= names a file of {script} with {' and '.join(values)}; {path} is none ({error})"
        ) from None


def _take_options(part: DrafterPart, defaults: dict[str, Any], also: Sequence[str] = ()) -> dict[str, Any]:
    """The part's options over the defaults, as values of the defaults' types; `also` names ones read elsewhere."""
    unknown = sorted(set(part.options) - set(defaults) - set(also))
    if unknown:
        raise ValueError(
            f"unknown option {', '.join(unknown)} of a {part.kind} drafter; valid are "
            f"{', '.join(sorted({*defaults, *also})) or 'none'}"
        )
    given = {key: _as(defaults[key], key, value) for key, value in part.options.items() if key not in also}
    return {**defaults, **given}
