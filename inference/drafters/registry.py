"""Build drafters from their command-line form: `NAME[=[KIND:]PATH[,key=value…][+…]]`.

`ctc=RUN/head`, `ctc_raw=RUN/head,tree=raw`, `draft_model=DIR`, `ngram`, `ngram,k=9`, `long=ngram,k=12`: a name,
then the path to load and the options. A kind that is left out is read from the checkpoint for heads; otherwise it is
the name if that is a kind, else `draft_model`. A name alone is a drafter that loads nothing. A path that exists may
have `,`, `+` and `:` in it: of several readings the one with the longest existing path counts.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draft_heads.configs.options import check_number, check_whole
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import load_head, read_config
from draft_heads.inference.drafters.base import Drafter, VanillaDrafter
from draft_heads.inference.drafters.heads.base import HeadDrafter
from draft_heads.inference.drafters.heads.chimera import ChimeraDrafter
from draft_heads.inference.drafters.heads.ctc import CTCDrafter
from draft_heads.inference.drafters.heads.eagle3 import Eagle3Drafter
from draft_heads.inference.drafters.heads.fast_weights import prepare_for_drafting
from draft_heads.inference.drafters.heads.hydra import HydraDrafter
from draft_heads.inference.drafters.heads.medusa import MedusaDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models.draft_model import (
    CascadeDrafter,
    DraftModelDrafter,
    SelfSpeculativeDrafter,
    load_draft_model,
)
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.drafters.text.rest import RESTDrafter
from draft_heads.inference.target.target import Target

DRAFTERS: dict[str, type[Drafter]] = {
    drafter.kind: drafter
    for drafter in (
        *(ChimeraDrafter, CTCDrafter, Eagle3Drafter, HydraDrafter, MedusaDrafter),
        *(CascadeDrafter, DraftModelDrafter, OuroborosDrafter, SelfSpeculativeDrafter),
        *(LookaheadDrafter, NgramDrafter, PromptLookupDrafter, RESTDrafter, VanillaDrafter),
    )
}
"""Kind → class, instantiated by `from_options`."""

HEAD_DRAFTERS: dict[str, type[HeadDrafter]] = {
    kind: drafter for kind, drafter in DRAFTERS.items() if issubclass(drafter, HeadDrafter)
}
"""Head kind → the class that drafts with heads of that kind; `drafter_for` makes one."""
_TUNED_REMEDY = "write it behind a head or Ouroboros, as in ctc=RUN/head,tuned=FILE"


# ----------------------------------------------------------------------------------------------------
# Parsing


@dataclass(frozen=True)
class DrafterPart:
    """One source of drafts: its kind, the path it loads ("" for none), its options."""

    kind: str
    path: str = ""
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterSpec:
    """A parsed drafter argument; `name` is its name in reports."""

    name: str
    parts: tuple[DrafterPart, ...]

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Parse a drafter argument; ValueError names the rule that it breaks."""
        name, equals, rest = text.partition("=")
        if "," in name:  # has options but no path
            name, rest = name.partition(",")[0], text
        if not name or (equals and not rest) or "/" in name:
            raise ValueError(
                f"a drafter is NAME or NAME=[KIND:]PATH[,key=value…][+…]; got {text!r}; write e.g. ctc=runs/ctc/head"
            )
        if name == "tuned":
            raise ValueError(f"tuned=FILE is no drafter but an option of one; got {text!r}; {_TUNED_REMEDY}")
        parts = tuple(cls._part(fields, name, text) for fields in _fields(rest or name))
        spec = cls(name, parts)
        for part in _options_apart(spec)[1]:
            _options_of(part)  # checked before anything is loaded
        return spec

    @staticmethod
    def _part(fields: list[str], name: str, whole: str) -> DrafterPart:
        location, *pairs = fields
        options = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise ValueError(
                    f"a drafter's options are key=value; got {pair!r} in {whole!r}; a path with , or + in it must exist"
                )
            if key in options:
                raise ValueError(f"a drafter's options have one value each; got {key} twice in {whole!r}; drop one")
            options[key] = value
        kind, colon, path = location.partition(":")
        if colon and (kind in DRAFTERS or not _loadable(location)):
            return DrafterPart(kind, path, options)
        if location in DRAFTERS:
            return DrafterPart(location, "", options)
        if name in DRAFTERS and name not in HEAD_DRAFTERS:
            return DrafterPart(name, location, options)
        if (Path(location) / "config.json").is_file() or "/" in location:
            return DrafterPart(_kind_at(location), location, options)
        raise ValueError(
            f"a drafter is one of {', '.join(sorted(DRAFTERS))} or the folder of a head checkpoint or draft model; got "
            f"{location!r} in {whole!r}"
        )


_BEFORE_PATH = re.compile(r"(?:\w+=)?(?:\w+:)?")  # of a field: `tuned=` or `via=`, `KIND:`


def _fields(text: str) -> list[list[str]]:
    """`ctc:RUN/head,tree=raw+ngram` as [["ctc:RUN/head", "tree=raw"], ["ngram"]]: not split within an existing path."""
    parts: list[list[str]] = [[]]
    while True:
        first, *later = [*(mark.start() for mark in re.finditer("[,+]", text)), len(text)]
        before = _BEFORE_PATH.match(text)
        starts = {0, before.end() if before else 0}
        end = next((end for end in later[::-1] if any(_loadable(text[start:end]) for start in starts)), first)
        parts[-1].append(text[:end])
        if end == len(text):
            return parts
        if text[end] == "+":
            parts.append([])
        text = text[end + 1 :]


def _loadable(path: str) -> bool:
    """Whether there is a head, a model, a datastore or a file at the path."""
    with suppress(OSError):  # a name that is too long, a folder that may not be read
        return any(Path(one).is_file() for one in (path, f"{path}/config.json", f"{path}/datastore.json"))
    return False


def _kind_at(path: str) -> str:
    """The kind of the head in a folder, or `draft_model` for a causal language model."""
    config = Path(path) / "config.json"
    if config.is_file() and re.search(r'"model_type"\s*:', config.read_text(encoding="utf-8")):
        return "draft_model"
    return str(read_config(path)["kind"])


# ----------------------------------------------------------------------------------------------------
# Building


def drafter_for(head: DraftHead, target: Target, max_nodes: int = 32, **options: Any) -> Drafter:
    """The drafter of a head that is in memory."""
    return HEAD_DRAFTERS[head.config.kind].for_target(head, target, max_nodes, **options)


def build_drafter(spec: DrafterSpec, target: Target, max_nodes: int = 32) -> Drafter:
    """The drafter a spec describes, on the target's device; ValueError names what is wrong with it."""
    return DrafterBuilder(target, max_nodes).build(spec)


class DrafterBuilder:
    """Builds drafters for one target; a head or draft model that several of them need is loaded once.

    See `inference.drafters.base.Builder`.
    """

    def __init__(self, target: Target, max_nodes: int = 32) -> None:
        """max_nodes: the default of the option of that name."""
        self.target, self.max_nodes = target, max_nodes
        self._heads: dict[str, DraftHead] = {}
        self._models: dict[str, Target] = {}

    def build(self, spec: DrafterSpec) -> Drafter:
        """See `build_drafter`."""
        own, parts = _options_apart(spec)
        drafters = [
            DRAFTERS[part.kind].from_options(part.path, self, **_options_of(part, self.max_nodes)) for part in parts
        ]
        if len(parts) == 1:
            return drafters[0]
        kinds = [part.kind for part in parts]
        earlier = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
        names = [f"{kind}_{1 + count}" if count else kind for kind, count in zip(kinds, earlier)]
        return HybridDrafter(list(zip(names, drafters)), self.target, self.max_nodes, **own)

    def head(self, kind: str, path: str) -> DraftHead:
        if path not in self._heads:
            head = load_head(path, self.target.fingerprint()).to(self.target.device, self.target.dtype)
            if head.config.kind != kind:
                raise ValueError(
                    f"a {kind} drafter needs a {kind} head; {path} holds one of kind {head.config.kind}; leave the "
                    "kind out to use the checkpoint's"
                )
            self.target.check_layers(head.config.target_layers)
            self._heads[path] = prepare_for_drafting(head)  # shared by all drafters with this head
        return self._heads[path]

    def draft_model(self, kind: str, path: str) -> Target:
        if path not in self._models:
            self._models[path] = load_draft_model(kind, path, self.target)
        return self._models[path]

    def inner(self, words: str, model: Target) -> Drafter | None:
        if not words:
            return None
        drafter = DrafterBuilder(model, self.max_nodes).build(DrafterSpec.parse(f"via={words}"))
        return drafter if drafter.max_nodes else None


# ----------------------------------------------------------------------------------------------------
# Options


def _options_apart(spec: DrafterSpec) -> tuple[dict[str, Any], list[DrafterPart]]:
    """The options of the hybrid, which may follow any of its parts, and the parts with theirs."""
    for part in spec.parts:
        if part.kind not in DRAFTERS:
            raise ValueError(
                f"drafter {spec.name!r} is of kind {part.kind!r}; known kinds are {', '.join(sorted(DRAFTERS))}"
            )
        if part.kind in HEAD_DRAFTERS and not part.path:
            raise ValueError(f"a {part.kind} drafter needs a trained head; got no path; write NAME=RUN/head")
    if len(spec.parts) == 1:
        return {}, [*spec.parts]
    if any(part.kind == "vanilla" for part in spec.parts):
        raise ValueError(f"drafter {spec.name!r} combines vanilla, which drafts nothing, with others; leave it out")
    own: dict[str, str] = {}
    for part in spec.parts:
        if "branches" in part.options and DRAFTERS[part.kind].extends_paths:
            raise ValueError(
                f"drafter {spec.name!r} gives branches to {part.kind}, but in a hybrid the shared tree decides how "
                f"many tokens follow a path; got branches={part.options['branches']}; leave it out"
            )
        for key in part.options.keys() & HybridDrafter.options.keys():
            if own.setdefault(key, part.options[key]) != part.options[key]:
                raise ValueError(
                    f"drafter {spec.name!r} gives {key}={own[key]} and {key}={part.options[key]}; a hybrid has "
                    "one; give it once"
                )
    parts = [
        replace(part, options={key: value for key, value in part.options.items() if key not in own})
        for part in spec.parts
    ]
    return _take_options(DrafterPart("hybrid", "", own), HybridDrafter.options), parts


def _options_of(part: DrafterPart, max_nodes: int = 32) -> dict[str, Any]:
    """Every option of a part's class, as given or by default."""
    kind = DRAFTERS[part.kind]
    defaults = {} if kind is VanillaDrafter else {"max_nodes": max_nodes}
    defaults = {**defaults, **kind.options, **_tuned(part, kind)}
    options = _take_options(part, {**defaults, "tuned": ""} if kind.tuned_options else defaults)
    options.pop("tuned", None)
    return options


def _tuned(part: DrafterPart, kind: type[Drafter]) -> dict[str, Any]:
    """The values that the option tuned=FILE reads from a tuning script's file; empty without it."""
    path, values = part.options.get("tuned"), kind.tuned_options
    if path is None:
        return {}
    if not values:
        raise ValueError(f"a drafter of kind {part.kind} takes no tuned=FILE; got tuned={path}; {_TUNED_REMEDY}")
    try:
        tuned = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, to_type in values.items():
            (check_whole if to_type is int else check_number)(name, tuned[name])
        return {name: to_type(tuned[name]) for name, to_type in values.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"tuned= needs a file of {kind.tuned_by} with {' and '.join(values)}; {path} is not one ({error})"
        ) from None


def _take_options(part: DrafterPart, defaults: dict[str, Any]) -> dict[str, Any]:
    """The defaults updated by the part's options, converted to the defaults' types."""
    unknown = sorted(set(part.options) - set(defaults))
    if unknown:
        raise ValueError(
            f"unknown option {', '.join(unknown)} of a {part.kind} drafter; valid are "
            f"{', '.join(sorted(defaults)) or 'none'}"
        )
    options = dict(defaults)
    for key, value in part.options.items():
        try:
            options[key] = type(defaults[key])(value)
        except ValueError:
            number = "a whole number" if isinstance(defaults[key], int) else "a number"
            raise ValueError(f"drafter option {key} must be {number}; got {value!r}") from None
    return options
