"""The options of a distillation, checked where they are declared; how the target is loaded is not among them."""

from __future__ import annotations

from dataclasses import dataclass, field

from draft_heads.data.dtypes import DTYPES


@dataclass
class DistillOptions:
    """Everything but the target, the source and the output; those marked * change the rows and must stay on resume.

    labels          * argmax (recorded text) or generate (the target's own answers)
    split           * split of a hub dataset
    limit           * only the first N conversations, None for all
    shuffle_seed    * shuffle the conversations before `limit`, None for file order
    max_length      * longest row in tokens, None for the target's positions or 2048, whichever is less
    max_new_tokens  * longest generated answer
    answer_prefix   * let the target continue the first 0 to N tokens (by row) of the recorded answer
    cut_loops       * end a generated answer where it begins to loop (`data.loops`)
    hidden_states   * cache the target's hidden states: None, `target` (its own type) or the name of a type
    target_layers   * with hidden_states: also cache the outputs of these layers of the target, for heads that read them
    shard_rows      * conversations per shard
    skip_bad_rows   * list unusable rows instead of stopping
    engine          * what generates: local, or openai (a /v1/completions server that returns token ids)
    batch_size        rows that are generated or labelled together
    base_url          the server of `engine="openai"`
    model_name        the model's name there, None for the first it lists
    """

    labels: str = "argmax"
    split: str = "train"
    limit: int | None = None
    shuffle_seed: int | None = None
    max_length: int | None = None
    max_new_tokens: int = 512
    answer_prefix: int = 0
    cut_loops: bool = False
    hidden_states: str | None = None
    target_layers: list[int] = field(default_factory=list)
    shard_rows: int = 1024
    skip_bad_rows: bool = False
    engine: str = "local"
    batch_size: int = 32
    base_url: str | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        for name, valid in (("labels", ("argmax", "generate")), ("engine", ("local", "openai"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"--{name} {getattr(self, name)} is unknown; pass one of {', '.join(valid)}")
        for name in ("limit", "max_length", "max_new_tokens", "shard_rows", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, received {value}")
        if self.answer_prefix < 0 or (self.answer_prefix and self.labels != "generate"):
            raise ValueError(
                "--answer_prefix must be 0 or more, and goes with --labels generate; received "
                f"{self.answer_prefix} with {self.labels}"
            )
        if self.hidden_states not in (None, "target", *DTYPES):
            raise ValueError(
                f"--hidden_states {self.hidden_states} is unknown; pass target or one of {', '.join(DTYPES)}"
            )
        if self.target_layers and self.hidden_states is None:
            raise ValueError(
                "--target_layers are cached with the hidden states; got it without --hidden_states; pass both, or "
                "neither: training computes them"
            )
        if (self.engine == "openai") != (self.base_url is not None):
            raise ValueError("--engine openai and --base_url URL go together; pass both or neither")
        if self.engine == "openai" and self.labels != "generate":
            raise ValueError("--engine openai generates answers; pass --labels generate with it")
