"""Build drafters from their command-line form: `NAME[=[KIND:]PATH[,key=value…][+…]]`.

`ctc=RUN/head`, `ctc_raw=RUN/head,tree=raw`, `draft_model=DIR`, `ngram`, `ngram,k=9`, `long=ngram,k=12`: a name,
then the path to load and the options. A kind that is left out is the name, if that is the kind of a drafter without a
head; else it is read from the head's checkpoint, or is `draft_model` for a causal language model. A name alone is a
drafter that loads nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from draft_heads.configs.options import check_whole, option_names
from draft_heads.data.fingerprint import weights_hashes
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import HEADS, load_head
from draft_heads.inference.drafters.base import Drafter, SlotLoop
from draft_heads.inference.drafters.heads.base import HeadDrafter
from draft_heads.inference.drafters.heads.fast_weights import prepare_for_drafting
from draft_heads.inference.drafters.hybrid.hybrid import OF_NGRAMS_ALONE, HybridDrafter, HybridOptions
from draft_heads.inference.drafters.models.draft_model import load_draft_model
from draft_heads.inference.drafters.options import (
    TUNED_REMEDY,
    DrafterOptions,
    TreeOptions,
    check_made_for,
    made_for,
    read_options,
)
from draft_heads.inference.drafters.text.lookahead import LookaheadOptions
from draft_heads.inference.drafters.words import is_loadable, kind_at, split_pairs, split_parts
from draft_heads.inference.target.target import Target

WITHOUT_TRAINING = (
    "base:VanillaDrafter",
    "text.ngram:NgramDrafter",
    "text.prompt_lookup:PromptLookupDrafter",
    "text.rest:RESTDrafter",
    "text.lookahead:LookaheadDrafter",
    "models.draft_model:DraftModelDrafter",
    "models.draft_model:CascadeDrafter",
    "models.draft_model:SelfSpeculativeDrafter",
    "models.ouroboros:OuroborosDrafter",
)
"""`MODULE:CLASS` of the drafters that need no trained head, one line each; modules are named from this folder."""


def _drafter_class(place: str) -> type[Drafter]:
    module, _, name = place.partition(":")
    found: type[Drafter] = getattr(import_module(f"draft_heads.inference.drafters.{module}"), name)
    return found


def _head_drafter(kind: str) -> type[Any]:
    """The `HeadDrafter` of a kind of head, in the module that has the kind's name."""
    module = import_module(f"draft_heads.inference.drafters.heads.{kind}")
    members = (found for found in vars(module).values() if isinstance(found, type) and issubclass(found, HeadDrafter))
    return next(found for found in members if found.kind == kind)


HEAD_DRAFTERS: dict[str, type[Any]] = {kind: _head_drafter(kind) for kind in HEADS}
"""Head kind → the class that drafts with heads of that kind, made by `drafter_for`."""
DRAFTERS: dict[str, type[Drafter]] = HEAD_DRAFTERS | {
    drafter.kind: drafter for drafter in map(_drafter_class, WITHOUT_TRAINING)
}
"""Kind → class, instantiated by `from_options`."""


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
        if not name or (equals and not rest) or "/" in name or any(map(str.isspace, name)):
            raise ValueError(
                f"a drafter is NAME or NAME=[KIND:]PATH[,key=value…][+…]; got {text!r}; write e.g. ctc=runs/ctc/head"
            )
        if name == "tuned":
            raise ValueError(f"tuned=FILE is no drafter but an option of one; got {text!r}; {TUNED_REMEDY}")
        parts = tuple(cls._part(fields, name, text) for fields in split_parts(rest or name))
        if name == "vanilla" and parts != (DrafterPart("vanilla"),):
            raise ValueError(f"the name vanilla is that of decoding without drafts; got {text!r}; rename the drafter")
        spec = cls(name, parts)
        options_of(spec)  # checked before anything is loaded
        return spec

    @staticmethod
    def _part(fields: list[str], name: str, whole: str) -> DrafterPart:
        location, *pairs = fields
        options = split_pairs(pairs, whole)
        kind, colon, path = location.partition(":")
        if colon and (kind in DRAFTERS or not is_loadable(location)):
            return DrafterPart(kind, path, options)
        if location in DRAFTERS:
            return DrafterPart(location, "", options)
        if name in DRAFTERS and name not in HEAD_DRAFTERS:
            return DrafterPart(name, location, options)
        if (Path(location) / "config.json").is_file() or "/" in location:
            return DrafterPart(kind_at(location), location, options)
        raise ValueError(
            f"a drafter is one of {', '.join(sorted(DRAFTERS))} or the folder of a head checkpoint or draft model; got "
            f"{location!r} in {whole!r}"
        )


# ----------------------------------------------------------------------------------------------------
# Building


def drafter_for(head: DraftHead, target: Target, max_nodes: int = 32, **options: Any) -> Drafter:
    """The drafter of a head that is in memory."""
    drafter: Drafter = HEAD_DRAFTERS[head.config.kind].for_target(head, target, max_nodes, **options)
    return drafter


def build_drafter(spec: DrafterSpec, target: Target, max_nodes: int = 32, slots: int = 1) -> Drafter:
    """The drafter a spec describes, for the texts of `slots` at once, on the target's device; ValueError names what is
    wrong with it."""
    return DrafterBuilder(target, max_nodes, slots).build(spec)


class DrafterBuilder:
    """Builds drafters for one target; a head or draft model that several of them need is loaded once.

    See `inference.drafters.base.Builder`.
    """

    def __init__(self, target: Target, max_nodes: int = 32, slots: int = 1) -> None:
        """max_nodes: the default of the option of that name; slots: texts that a drafter drafts for at once."""
        check_whole("slots", slots, least=1, remedy="1 drafts for one text at a time")
        self.target, self.max_nodes, self.slots = target, max_nodes, slots
        self._heads: dict[str, DraftHead] = {}
        self._hashes: dict[str, str] = {}  # of the weights of heads as they were loaded
        self._models: dict[str, Target] = {}

    def build(self, spec: DrafterSpec) -> Drafter:
        """See `build_drafter`."""
        own, options = options_of(spec, self.max_nodes)
        drafters = [self._of_all_slots(part, chosen) for part, chosen in zip(spec.parts, options)]
        for part in spec.parts:
            if "tuned" in part.options:
                model = self._models.get(part.path)
                hashed = self._hashes[part.path] if model is None else model.fingerprint()["weights_hash"]
                check_made_for(part.options["tuned"], made_for(part.kind, part.path, hashed, self.target))
        if len(drafters) == 1:
            return drafters[0]
        kinds = [part.kind for part in spec.parts]
        earlier = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
        names = [f"{kind}_{1 + count}" if count else kind for kind, count in zip(kinds, earlier)]
        return HybridDrafter(list(zip(names, drafters)), self.target, self.max_nodes, **asdict(own))

    def _of_all_slots(self, part: DrafterPart, options: DrafterOptions) -> Drafter:
        """A part's drafter; one for each slot where its kind keeps the state of one text."""
        kind = DRAFTERS[part.kind]
        drafter = kind.from_options(part.path, self, **asdict(options))
        if drafter.slots == self.slots:
            return drafter
        others = [kind.from_options(part.path, self, **asdict(options)) for _ in range(1, self.slots)]
        return SlotLoop([drafter, *others], self.target.device)

    def head(self, kind: str, path: str) -> DraftHead:
        if path not in self._heads:
            head = load_head(path, self.target.fingerprint())
            self._hashes[path] = weights_hashes(head)["weights_hash"]
            head = head.to(self.target.device, self.target.dtype)
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


def options_of(spec: DrafterSpec, max_nodes: int | None = None) -> tuple[HybridOptions, list[DrafterOptions]]:
    """The options of a hybrid, which may follow any of its parts, and those of every part; ValueError for wrong ones.

    max_nodes: the default of the option of that name, in a hybrid of a window's too; None: what the options declare
    """
    for part in spec.parts:
        _check_path(spec, part)
    own = _hybrid_words(spec) if len(spec.parts) > 1 else {}
    options = []
    bounded = (TreeOptions, LookaheadOptions) if len(spec.parts) > 1 else TreeOptions
    for part in spec.parts:
        options_type = DRAFTERS[part.kind].options_type
        budget = {"max_nodes": max_nodes} if max_nodes is not None and issubclass(options_type, bounded) else {}
        words = {key: value for key, value in part.options.items() if key not in own}
        options.append(read_options(part.kind, options_type, words, **budget))
    return read_options("hybrid", HybridOptions, own), options


def _check_path(spec: DrafterSpec, part: DrafterPart) -> None:
    """ValueError for an unknown kind, and for a path that is missing or of no use."""
    if part.kind not in DRAFTERS:
        raise ValueError(
            f"drafter {spec.name!r} is of kind {part.kind!r}; known kinds are {', '.join(sorted(DRAFTERS))}"
        )
    loads = DRAFTERS[part.kind].loads
    if loads and not part.path:
        raise ValueError(f"{part.kind} needs a path; got none; write {part.kind}={loads}")
    if part.path and not loads:
        raise ValueError(
            f"{part.kind} loads nothing; got the path {part.path!r}; write {part.kind} alone, options after commas"
        )


def _hybrid_words(spec: DrafterSpec) -> dict[str, str]:
    """The hybrid's own options among those of its parts; ValueError for parts that go into no hybrid."""
    if any(part.kind == "vanilla" for part in spec.parts):
        raise ValueError(f"drafter {spec.name!r} combines vanilla, which drafts nothing, with others; leave it out")
    own: dict[str, str] = {}
    for part in spec.parts:
        for key in OF_NGRAMS_ALONE if DRAFTERS[part.kind].extends_paths else ():
            if key in part.options:
                raise ValueError(
                    f"drafter {spec.name!r} gives {key} to {part.kind}, but in a hybrid the shared tree decides which "
                    f"paths n-grams lengthen; got {key}={part.options[key]}; leave it out: depth=N bounds the depth of "
                    "the tree, --max_nodes its nodes"
                )
        for key in part.options.keys() & set(option_names(HybridOptions)):
            if own.setdefault(key, part.options[key]) != part.options[key]:
                raise ValueError(
                    f"drafter {spec.name!r} gives {key}={own[key]} and {key}={part.options[key]}; a hybrid has "
                    "one; give it once"
                )
    return own
