"""The options of a distillation, checked where they are declared; how the target is loaded is not among them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from draft_heads.configs.options import DTYPES, check_options, option
from draft_heads.data.text.conversations import DatasetOptions

_READ_WITH = {
    "max_new_tokens": ("labels", "generate"),
    "cut_loops": ("labels", "generate"),
    "concurrency": ("engine", "openai"),
    "model_name": ("engine", "openai"),
}
"""Options that one choice of another option alone reads."""


@dataclass
class DistillOptions(DatasetOptions):
    """Everything but the target, the source and the output.

    Those below the line may change when a run is resumed; skip_bad_rows may be added.
    """

    labels: str = option(
        "argmax",
        "argmax: label recorded answers; generate: let the target answer anew (argmax)",
        choices=("argmax", "generate"),
    )
    limit: int | None = option(
        None, "read N conversations, and no further than the last of them; of these some may be left out", least=1
    )
    shuffle_seed: int | None = option(
        None, "shuffle with this seed before --limit, for which the whole file is read", least=0
    )
    max_length: int | None = option(None, "cut rows after N tokens (2048, or the target's positions if fewer)", least=1)
    max_new_tokens: int = option(512, "longest generated answer, in tokens (512)", least=1)
    cut_loops: bool = option(True, "end a generated answer where it starts to repeat itself endlessly (true)")
    hidden_states: str | None = option(
        None,
        "store the target's hidden states for training, in its own type or in another",
        choices=("target", *DTYPES),
        const="target",
    )
    target_layers: list[int] = option(
        [], "with --hidden_states: also store the outputs of these decoder layers, from 1"
    )
    shard_rows: int = option(1024, "conversations per shard (1024)", least=1)
    engine: str = option(
        "local",
        "what writes the answers: the target loaded here, or the server at --base_url (local)",
        choices=("local", "openai"),
    )
    # --- free on resume ---------------------------------------------------------------------------------------------
    batch_size: int = option(32, "rows generated and labelled together (32)", least=1)
    drafter: str = option("", "drafts the generated answers, which stay the same: ngram, ctc=RUN/head, … (none)")
    base_url: str | None = option(None, "URL of the --engine openai server, e.g. http://127.0.0.1:8000/v1")
    concurrency: int = option(256, "requests that the server gets at once (256)", least=1)
    model_name: str | None = option(None, "name of the model on that server (the one that it lists)")

    def __post_init__(self) -> None:
        check_options(self)
        if self.target_layers and self.hidden_states is None:
            raise ValueError(
                "--target_layers are cached with the hidden states; got it without --hidden_states; pass both, or "
                "neither: training computes them"
            )
        if (self.engine == "openai") != (self.base_url is not None):
            raise ValueError("--engine openai and --base_url URL go together; pass both or neither")
        if self.drafter and (self.labels, self.engine) != ("generate", "local"):
            raise ValueError(
                f"--drafter drafts the answers that the target writes here; got {self.drafter!r} with --labels "
                f"{self.labels} --engine {self.engine}; pass --labels generate --engine local, or leave it out"
            )
        if self.engine == "openai" and self.labels != "generate":
            raise ValueError("--engine openai generates answers; pass --labels generate with it")

    def check_read(self) -> None:
        """ValueError for an option that was changed and that nothing reads beside the others."""
        for f in fields(self):
            if f.name not in _READ_WITH:
                continue
            mode, choice = _READ_WITH[f.name]
            value, chosen = getattr(self, f.name), getattr(self, mode)
            if value != f.default and chosen != choice:
                raise ValueError(
                    f"--{f.name} is read with --{mode} {choice} only; got {value} with --{mode} {chosen}; leave it "
                    f"out, or pass --{mode} {choice}"
                )
