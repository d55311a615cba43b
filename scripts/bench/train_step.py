"""Whole training steps, ours against the plain way. The last line of output is one JSON object.

    python scripts/bench/train_step.py --target DIR --dataset OUT [--heads KIND …] [--rows 64]

Both arms train the same head on the same rows in one process, in turn: target forward, head, loss, backward.

- ours: rows of similar length (`--tokens_per_batch`), the target's hidden states without mask and logits, attention
  a few anchors at a time, fused losses
- plain: rows as they were drawn, `--rows_per_batch` each, padded; the target's logits at every position, one
  dense mask for all anchors, `F.ctc_loss` and `F.cross_entropy` on the logits of all windows

Peak memory is that of one pass above what was there before, each arm in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from draft_heads.configs.command_line import exit_status

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_heads.configs.options import add_threads, use_threads
from draft_heads.configs.recipes import load_recipe, size_class
from draft_heads.data.collate import row_lengths
from draft_heads.data.common.model_sizes import count_parameters
from draft_heads.heads import attention, base
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import HEADS, head_classes, new_head, recipe_settings
from draft_heads.heads.ctc_loss import ctc_loss_reference
from draft_heads.inference.evaluation.report import environment
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.decode import in_turn, one_device, ratio
from draft_heads.scripts.decoding_options import check_positive, script_parser
from draft_heads.train.batches import TokenBatches
from draft_heads.train.options import RunOptions
from draft_heads.train.training_data import load_data

ARMS = ("ours", "plain")


def plain_ctc(
    frames: Tensor,
    blank_weight: Tensor,
    blank_bias: Tensor,
    lm_head: Tensor,
    labels: Tensor,
    lengths: Tensor,
    closed: Tensor,
    lm_bias: Tensor | None = None,
    chunk_bytes: int | None = None,
    decay: float = 1.0,
    accept: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `ctc_loss_fused`, on the log-softmax of all frames."""
    assert decay == 1 and not accept, "F.ctc_loss weighs no labels"
    blank = (frames @ blank_weight + blank_bias)[..., None]
    log_probs = torch.cat([F.linear(frames, lm_head, lm_bias), blank], -1).float().log_softmax(-1)
    return ctc_loss_reference(log_probs, labels, lengths, closed)


def plain_cross_entropy(states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.cross_entropy(F.linear(states, weight, bias).float(), labels, reduction="sum")


def plain_soft_cross_entropy(
    states: Tensor,
    weight: Tensor,
    hidden: Tensor,
    target: Any,
    row_weights: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wanted = target.logits(hidden).float().softmax(-1)
    losses = F.cross_entropy(F.linear(states, weight, bias).float(), wanted, reduction="none")
    return (losses if row_weights is None else losses * row_weights).sum(), losses.detach()


PLAIN = {
    "ctc_loss_fused": plain_ctc,
    "anchor_attention": partial(attention.dense_anchor_attention, anchors_per_chunk=10**9),
    "linear_cross_entropy": plain_cross_entropy,
    "soft_cross_entropy": plain_soft_cross_entropy,
}


def replaced() -> list[tuple[ModuleType, str]]:
    """Where a function of `PLAIN` stands for ours: in the modules of the heads and what they share."""
    modules = [base, *(sys.modules[head_classes(kind)[0].__module__] for kind in HEADS)]
    return [(module, name) for module in modules for name in PLAIN if hasattr(module, name)]


@contextmanager
def plain_functions() -> Iterator[None]:
    """The heads compute their losses the plain way in here."""
    with ExitStack() as patches:
        for module, name in replaced():
            patches.enter_context(patch.object(module, name, PLAIN[name]))
        yield


class Bench:
    """A target, rows and a head; `pass_over(arm)` trains on all rows once, without an optimizer's step."""

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        self.args = args
        self.target = Target.from_pretrained(args.target, args.dtype, args.device)
        run = RunOptions(args.target, [args.dataset], held_out=1)
        layers = head_classes(kind)[1].usual_layers(self.target.config.num_hidden_layers)
        rows, _, _, self.collate = load_data(run, self.target, layers)
        self.collate.hidden_dtype = None  # both arms compute the target's states, where a dataset has them too
        chosen = random.Random(0).sample(range(len(rows)), min(args.rows, len(rows)))  # with states they come by length
        self.rows = rows.select(chosen)
        lengths = [min(length, self.collate.max_length) for length in row_lengths(self.rows)]
        self.tokens = sum(lengths)
        places = range(len(lengths))
        orders = {
            "ours": TokenBatches(lengths, max(args.tokens_per_batch, max(lengths)), 0),
            "plain": [places[i : i + args.rows_per_batch] for i in places[:: args.rows_per_batch]],
        }
        self.batches = {arm: [self.collate([self.rows[row] for row in rows]) for rows in orders[arm]] for arm in ARMS}
        self.fill = {
            arm: self.tokens / sum(batch["input_ids"].numel() for batch in batches)
            for arm, batches in self.batches.items()
        }
        parameters, gpu = count_parameters(self.target.model.config), self.target.device.type == "cuda"
        recipe = load_recipe(kind, size_class(parameters, gpu))
        settings = recipe_settings(kind, recipe)
        settings.pop("draft_vocab_size", None)
        if "decay" in settings:
            settings["decay"] = 1.0  # the plain CTC loss has no other
        torch.manual_seed(0)
        settings["end_token_ids"] = sorted(self.target.end_token_ids)
        self.head: DraftHead = new_head(kind, self.target.config, **settings).to(self.target.device)
        self.view = self.target.view()
        self.spent = {"target": 0.0, "head and loss": 0.0, "backward": 0.0}

    def pass_over(self, arm: str) -> float:
        """The summed loss of all rows."""
        total, layers = 0.0, self.head.config.target_layers
        with plain_functions() if arm == "plain" else nullcontext():
            for batch in self.batches[arm]:
                batch = {name: value.to(self.target.device) for name, value in batch.items()}
                start = self._now()
                states = self.target.states_of(batch, layers) if arm == "ours" else self.plain_states(batch, layers)
                forward = self._now()
                loss = self.head(**batch | states, target=self.view).total
                lost = self._now()
                loss.backward()
                total += float(loss.detach())
                if arm == "ours":
                    for part, seconds in zip(self.spent, (forward - start, lost - forward, self._now() - lost)):
                        self.spent[part] += seconds
        self.head.zero_grad()
        return total

    @torch.no_grad()
    def plain_states(self, batch: dict[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
        """What the whole model gives for padded rows; its logits are made, and nobody reads them."""
        output = self.target.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["segment_ids"],
            use_cache=False,
            output_hidden_states=True,
        )
        found = {"hidden": output.hidden_states[-1]}
        if layers:
            found["aux_hidden"] = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
        return found

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes at the peak of some work above what was there before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    clear.write_text("5")  # resets the resident set's high-water mark
    before = int(status.read_text().split("VmRSS:")[1].split()[0])
    work()
    return 1024 * (int(status.read_text().split("VmHWM:")[1].split()[0]) - before)


def peak_in_own_process(*flags: str, **environment: str) -> int:
    """Bytes that this script reports, called once more with `flags`, of which one is `--arm`, in place of its own."""
    own, replaced = list[str](), False
    for word in sys.argv:
        replaced = word.partition("=")[0] in flags if word.startswith("--") else replaced
        own += [] if replaced else [word]
    command = [sys.executable, *own, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | environment)
    if done.returncode:  # it has said why
        raise ValueError(
            f"the memory of an arm is measured in a process of its own, which ended with {done.returncode}"
        )
    found: int = json.loads(done.stdout.splitlines()[-1])["peak_bytes"]
    return found


def measure(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The row of one head, printed too."""
    peaks = {arm: peak_in_own_process("--arm", arm, "--heads", kind) for arm in ARMS}
    bench = Bench(args, kind)
    losses = {arm: bench.pass_over(arm) for arm in ARMS}
    if not math.isclose(*losses.values(), rel_tol=0.01):
        raise ValueError(f"both arms must have one loss; {kind}'s are {losses}; what is timed is not the same work")
    bench.spent = dict.fromkeys(bench.spent, 0.0)
    seconds = in_turn({arm: partial(bench.pass_over, arm) for arm in ARMS}, args.repeats, bench.target.device)
    shares = {part: round(spent / sum(bench.spent.values()), 3) for part, spent in bench.spent.items()}
    faster = ratio(seconds["plain"], seconds["ours"])
    row = {
        **{"head": kind, "tokens": bench.tokens, "losses": {arm: round(loss, 3) for arm, loss in losses.items()}},
        "tokens_per_second": {arm: round(bench.tokens / statistics.median(taken)) for arm, taken in seconds.items()},
        **{"faster": faster, "fill": {arm: round(fill, 3) for arm, fill in bench.fill.items()}},
        **{"peak_bytes": peaks, "memory": round(peaks["ours"] / peaks["plain"], 3), "shares": shares},
    }
    print(
        f"{kind}: {faster['median']:.2f} ({faster['low']:.2f}–{faster['high']:.2f}) times the plain way's tokens a "
        f"second; peak {peaks['ours'] / 2**20:.0f} against {peaks['plain'] / 2**20:.0f} MiB; {shares}",
        flush=True,
    )
    return row


def run() -> None:
    parser = script_parser(__doc__, config=False)
    add = parser.add_argument
    add("--target", required=True, help="folder or hub id of the target")
    add("--dataset", required=True, help="what scripts/distill.py wrote with this target")
    add("--heads", nargs="+", choices=sorted(HEADS), default=sorted(HEADS))
    for name, default in {"rows": 64, "tokens_per_batch": 4096, "rows_per_batch": 8, "repeats": 5}.items():
        add(f"--{name}", type=int, default=default)
    add_threads(parser)
    add("--dtype", help="default: float32 on CPU, the checkpoint's own on GPU")
    add("--device", help="default: cuda if present")
    add("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    check_positive(args, "rows", "tokens_per_batch", "rows_per_batch", "repeats")
    args.device = str(one_device(args.device))
    use_threads(args.threads)
    if args.arm:
        bench = Bench(args, args.heads[0])
        print(json.dumps({"peak_bytes": peak_memory(partial(bench.pass_over, args.arm), bench.target.device)}))
        return
    rows = [measure(args, kind) for kind in args.heads]
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps({"benchmark": "train_step", "rows": rows, "environment": environment(device)}))


if __name__ == "__main__":
    sys.exit(exit_status(run))
