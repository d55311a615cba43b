"""What is saved of a head beside its weights: the sizes it takes from its target, and its settings."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from draft_heads.configs.options import check_options, option
from draft_heads.data.common.pretrained import layer_sizes

WEIGHTS, CONFIG, PROVENANCE, CARD = "model.safetensors", "config.json", "provenance.json", "README.md"
"""The files of a head's folder."""

WEIGHTS_SHA256 = "sha256_of_weights"
"""The key of a provenance under which the file has the SHA-256 of the weights beside it."""

DECAY = ("above 0 and at most 1", lambda decay: 0 < decay <= 1)
"""The `rule` of an option --decay, the weight of a label over that of the label before it."""

LOSS_WEIGHT = ("0 or more", lambda weight: 0 <= weight < math.inf)
"""The `rule` of an option that weighs a part of a loss."""

FORMAT_VERSION = 2
"""Of `config.json`; files without one are version 0."""


@dataclass(frozen=True)
class Budget:
    """What a head may cost at the shape of Llama-3.1-8B with its recipe; `tests/test_every_head.py` measures it."""

    training: float  # GiB that a training step needs beside weights, inputs and the head's own gradients
    whole_vocabulary: float  # the same without the recipe's draft vocabulary
    drafting: float = 0.25  # kernels of drafting a tree of 32 nodes, over those of verifying it


@dataclass
class HeadConfig(ABC):
    """Sizes a head takes from its target, and which target that was. Subclasses add what the method needs.

    They also declare the head, once for all commands, benches and tests:

    kind      its name on command lines, that of its module, and what `config.json` says
    title     what it is called in a sentence
    variants  name → option values worth being sized, benched and tested beside the defaults, the one with most parts
              last; `paper` has the published settings where the defaults are others
    budget    what it may cost
    cut_at_disagreement  whether a window of labels ends where text and labels differ: not for heads that read the
              tokens before each label in the text, so that a label after a disagreement is valid
    reads_base_token  whether drafts depend on the base token; where not, a cut window begins only where the text's
              base token is the target's own, after which the labels come
    learns_distribution  whether a loss compares the head with the target's distribution, in which a checkpoint's own
              settings, as a penalty on repetition, are not: they are in its labels and in what it answers
    """

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""
    variants: ClassVar[dict[str, dict[str, Any]]] = {}
    budget: ClassVar[Budget]
    cut_at_disagreement: ClassVar[bool] = True
    reads_base_token: ClassVar[bool] = True
    learns_distribution: ClassVar[bool] = False
    hidden_size: int = 0
    vocab_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    end_token_ids: list[int] = field(default_factory=list)
    target: str = ""
    target_fingerprint: dict[str, Any] = field(default_factory=dict)
    trained_length: int = 0  # tokens of the longest row that it was trained on; 0: unknown
    token_scale: float = 1.0  # what heads multiply the target's embeddings by; `DraftHead.start_from` sets it
    tree_temperature: float = 1.0  # divides the log-probabilities a draft tree is built from; scripts/tune_tree.py
    target_layers: list[int] = option(
        [], "layers of the target, from 1, read beside its last hidden state, e.g. 2 16 29"
    )
    anchors: int = option(0, "anchors sampled per conversation and step; 0 trains on every one", least=0)
    accept_weight: float = option(
        0.0,
        "weigh the loss of a label by how probable it is that drafts reach it, to this power; 0: as in the papers",
        rule=("from 0 to 1", lambda alpha: 0 <= alpha <= 1),
    )
    draft_vocab_size: int = option(0, "draft from this many most frequent answer tokens; 0: from all")

    @property
    @abstractmethod
    def offsets(self) -> int:
        """U, how many labels after the base token a head drafts."""

    @property
    def classes(self) -> int:
        """D, how many tokens a head scores: those of its draft vocabulary, or all."""
        return self.draft_vocab_size or self.vocab_size

    def offset_weight(self, k: int) -> float:
        """Weight of the cross entropy at offset k from 0."""
        return 1.0

    def __post_init__(self) -> None:
        check_options(self)
        check_tree_temperature(self.tree_temperature)
        least, most = max(1, len(set(self.end_token_ids))), self.vocab_size
        size = self.draft_vocab_size
        if size < 0 or (most and size and not least <= size <= most):  # the target's sizes are read after the options
            raise ValueError(
                "--draft_vocab_size must be 0 (the whole vocabulary) or a number of tokens"
                f"{f' from {least} to {most}' if most else ''}, the end tokens among them; got {size}; leave it out or "
                "pick one in that range"
            )

    @classmethod
    def usual_layers(cls, layers: int) -> list[int]:
        """The `target_layers` of a head that was given none, for a target of so many layers."""
        return []

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    def to_json_string(self, use_diff: bool = True) -> str:
        """JSON text; the signature is the one transformers' logging callbacks call."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        given = {key: value for key, value in values.items() if key != "kind"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(
                f"unknown {cls.kind} head setting {', '.join(unknown)}; valid are {', '.join(sorted(known))}"
            )
        types = get_type_hints(cls)
        for name, value in given.items():
            if not _is_of(types[name], value):
                wanted = str(types[name]) if get_origin(types[name]) else types[name].__name__
                raise ValueError(f"{name} must be of type {wanted}; got {value!r}; copy it again")
        return cls(**given)


def _is_of(expected: Any, value: Any) -> bool:
    """Whether a JSON value is of a field's type: whole numbers also count as float."""
    if get_origin(expected) is list:
        return isinstance(value, list) and all(_is_of(get_args(expected)[0], item) for item in value)
    plain = get_origin(expected) or expected
    return type(value) is plain or (plain is float and type(value) is int)


def spread_layers(layers: int) -> list[int]:
    """A low, a middle and a high layer: EAGLE-3's (2, n/2, n−3); of a shallow target three others, or all before its
    last.

    Worked examples: 32 layers give 2, 16, 29; 4 give 1, 2, 3; 2 give 1.
    """
    published = [2, layers // 2, layers - 3]
    return published if published == sorted(set(published)) else list(range(1, layers))[-3:]


def check_target_layers(layers: Sequence[int], count: int, name: str) -> None:
    """ValueError unless heads can read these layers of the target `name`, which has `count`: not the last one's."""
    if layers and (sorted(set(layers)) != list(layers) or not 1 <= min(layers) <= max(layers) < count):
        raise ValueError(
            f"target_layers are ascending numbers from 1 to {count - 1}, the layers of {name} before its last; got "
            f"{' '.join(map(str, layers))}; pick others or leave it out"
        )


def check_tree_temperature(temperature: float) -> None:
    """ValueError unless trees can be built at this temperature; an infinite one would make all tokens equal."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"tree_temperature must be a number above 0; got {temperature}; 1 leaves drafts alone")


SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
OF_THE_TARGET = {*SIZES, "rms_norm_eps", "rope_theta", "token_scale", "end_token_ids", "target", "target_fingerprint"}
"""Fields that follow from the target: a head with a default instead of one of them would draft worse, or not at all."""


def target_sizes(config: Any) -> dict[str, Any]:
    """The sizes of `HeadConfig` read from a transformers decoder config; missing ones get the usual defaults.

    ValueError for a target whose embeddings and LM head are not as wide as its layers, which no head is made for.
    """
    config = layer_sizes(config)
    heads = config.num_attention_heads
    if (read := getattr(config, "word_embed_proj_dim", config.hidden_size)) != config.hidden_size:
        raise ValueError(
            f"heads need a target whose LM head reads states as wide as its layers; {config.model_type}'s reads "
            f"{read} values, its layers have {config.hidden_size}; pick another target"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(one, dict) for one in rope.values()):  # one set of parameters per layer type; some have none
        rope = rope.get("full_attention") or rope.get("sliding_attention") or {}
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate_size": width[-1] if isinstance(width, (list, tuple)) else width,  # a list has that of each layer
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope_theta": float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
    }
