"""What a hybrid has learned, kept in a file: the next process begins where this one ended, without its trials.

    {"format_version": 5, "of": …, "steps": N, "calibration": …, "costs": …,
     "parts": [{"account": …, "failed": …, "pause": …}]}

`of` says which hybrid learned it for which target on which machine: prices and what pays are no other's.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draft_heads.heads.checkpoint import write_text
from draft_heads.inference.drafters.hybrid.account import Account
from draft_heads.inference.drafters.hybrid.calibration import Calibration
from draft_heads.inference.drafters.hybrid.running_costs import RunningCosts
from draft_heads.inference.target.target import Target

FORMAT_VERSION = 5


class LearnedPart(NamedTuple):
    """failed: whether it did not pay when it was tried last; pause: target steps that it stays off (None: it is on)"""

    account: Account
    failed: bool
    pause: int | None


@dataclass
class Learned:
    """steps: target steps that taught it"""

    steps: int
    calibration: Calibration
    costs: RunningCosts
    parts: Sequence[LearnedPart]

    def state_dict(self) -> dict[str, Any]:
        """As JSON can say it."""
        return {
            "steps": self.steps,
            "calibration": self.calibration.state_dict(),
            "costs": self.costs.state_dict(),
            "parts": [{**part._asdict(), "account": part.account.state()} for part in self.parts],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Learned:
        """What `state_dict` said."""
        parts = []
        for part in state["parts"]:
            account = Account([*map(float, part["account"])])
            pause = None if part["pause"] is None else int(part["pause"])
            parts.append(LearnedPart(account, bool(part["failed"]), pause))
        calibration = Calibration.from_state(state["calibration"], len(parts))
        return cls(int(state["steps"]), calibration, RunningCosts.from_state(state["costs"]), parts)


class LearnedFile:
    """The file of one hybrid for one target on one machine."""

    def __init__(self, path: str | Path, hybrid: Mapping[str, Any], target: Target) -> None:
        """hybrid: the parts and settings that must be equal for the file to be this one's, as JSON can say them."""
        on_gpu = target.device.type == "cuda"
        self.path = Path(path)
        self.of = {
            **hybrid,
            "target": target.vocab_size if target.tokenizer is None else target.fingerprint(),
            "name": target.name,
            "layers": len(target.layer_types),
            "attention": target.fused.attention if target.fused else None,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(target.device) if on_gpu else platform.machine(),
            "threads": torch.get_num_threads(),
            "compiled": target.compiled,
        }

    def load(self) -> Learned | None:
        """None where there is no file yet; ValueError for one that is damaged or another's."""
        remedy = "delete it to begin anew, or name another"
        if not self.path.exists():
            return None
        try:
            state = json.loads(self.path.read_text(encoding="utf-8"))
            of = dict(state["of"])
            different = [name for name in {**of, **self.of} if of.get(name) != self.of.get(name)]
            if state["format_version"] == FORMAT_VERSION and not different:
                learned = Learned.from_state(state)
                if len(learned.parts) == len(of["parts"]):
                    return learned
                raise ValueError(f"{len(learned.parts)} accounts of {len(of['parts'])} parts")
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"learned= names a file that a hybrid wrote; {self.path} is cut short or is none ({error!r}); {remedy}"
            ) from None
        if not different:
            raise ValueError(
                f"what a hybrid learned must have format_version {FORMAT_VERSION}; {self.path} has "
                f"{state['format_version']}; {remedy}"
            )
        told = "; ".join(f"{name} was {of.get(name)!r} and is {self.of.get(name)!r}" for name in different)
        raise ValueError(
            f"what a hybrid learned is for the same parts and target on the same machine; {self.path}: {told}; {remedy}"
        )

    def save(self, learned: Learned) -> None:
        """Replace the file in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {"format_version": FORMAT_VERSION, "of": self.of, **learned.state_dict()}
        write_text(self.path, json.dumps(state) + "\n")
