"""Training benchmarks. The last line of output is one JSON object.

    python scripts/bench/train.py --loss [ctc cross_entropy soft_cross_entropy] [--windows 1024 --hidden 256 1024 …]

`--loss` compares the chunked losses of `heads.ctc_loss` and `heads.cross_entropy` with the plain way, which holds all
logits: `log_softmax` and `F.ctc_loss` for CTC; `F.cross_entropy` for the labels of Medusa, Hydra and Chimera and for
the target's distribution, which EAGLE-3 learns. Forward and backward, the LM-head product in both. Peak memory is
measured above the inputs, each arm in a process of its own; times are interleaved in one process.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

import torch
from torch import Tensor

from draft_heads.configs.options import add_threads, use_threads
from draft_heads.heads.base import TargetView
from draft_heads.heads.cross_entropy import linear_cross_entropy, soft_cross_entropy
from draft_heads.heads.ctc_loss import ctc_loss_fused
from draft_heads.scripts.bench.decode import in_turn, one_device
from draft_heads.scripts.bench.train_step import (
    peak_in_own_process,
    peak_memory,
    plain_cross_entropy,
    plain_ctc,
    plain_soft_cross_entropy,
)
from draft_heads.scripts.decoding_options import check_positive, script_parser

ARMS = ("chunked", "plain")
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once, so that the peak is what is in use
Inputs = tuple[list[Tensor], tuple[Any, ...]]
"""What is trained, and the arguments of a loss."""


def ctc(args: argparse.Namespace, hidden: int) -> Inputs:
    """Every window's frames aligned to its labels; the LM head is frozen."""
    frames = torch.randn(args.windows, args.frames, hidden).requires_grad_()
    lm_head = torch.randn(args.vocab, hidden) * hidden**-0.5
    weight, bias = torch.zeros(hidden).requires_grad_(), torch.full((), 8.0).requires_grad_()
    labels = torch.randint(0, args.vocab, (args.windows, args.labels))
    lengths, closed = torch.full((args.windows,), args.labels), torch.ones(args.windows, dtype=torch.bool)
    return [frames, weight, bias], (frames, weight, bias, lm_head, labels, lengths, closed)


def states_and_lm_head(args: argparse.Namespace, hidden: int) -> list[Tensor]:
    """Windows × labels states, and an LM head of the head's own, which is trained."""
    states = torch.randn(args.windows * args.labels, hidden).requires_grad_()
    return [states, (torch.randn(args.vocab, hidden) * hidden**-0.5).requires_grad_()]


def hard(args: argparse.Namespace, hidden: int) -> Inputs:
    """One label for each state."""
    trained = states_and_lm_head(args, hidden)
    return trained, (*trained, torch.randint(0, args.vocab, (len(trained[0]),)))


def soft(args: argparse.Namespace, hidden: int) -> Inputs:
    """The target's distribution for each state."""
    trained = states_and_lm_head(args, hidden)
    read = torch.randn(len(trained[0]), hidden)
    target = TargetView(torch.nn.Embedding(1, hidden), torch.randn(args.vocab, hidden) * hidden**-0.5)
    return trained, (*trained, read, target)


LOSSES: dict[str, tuple[Callable[[argparse.Namespace, int], Inputs], Callable[..., Any], Callable[..., Any]]] = {
    "ctc": (ctc, lambda *given: ctc_loss_fused(*given)[0], lambda *given: plain_ctc(*given)[0]),
    "cross_entropy": (hard, linear_cross_entropy, plain_cross_entropy),
    "soft_cross_entropy": (
        soft,
        lambda *given: soft_cross_entropy(*given)[0],
        lambda *given: plain_soft_cross_entropy(*given)[0],
    ),
}
"""Name → its inputs, the chunked way and the plain one."""


def make_arms(loss: str, args: argparse.Namespace, hidden: int) -> dict[str, Callable[[], float]]:
    """For each arm a function that runs one forward and backward pass and returns the loss."""
    inputs, *ways = LOSSES[loss]
    torch.manual_seed(0)
    with args.device:
        trained, given = inputs(args, hidden)

    def run(way: Callable[..., Tensor]) -> float:
        for leaf in trained:
            leaf.grad = None
        value = way(*given)
        value.backward()
        return float(value.detach())

    return {arm: partial(run, way) for arm, way in zip(ARMS, ways)}


def bench_loss(loss: str, args: argparse.Namespace, hidden: int) -> dict[str, object]:
    """Peak bytes and median seconds of both arms at one hidden size, and their ratios; the row is printed too."""
    same = ("--loss", loss, "--hidden", str(hidden))
    peaks = {arm: peak_in_own_process("--arm", arm, *same, **GIVES_BACK) for arm in ARMS}
    arms, device = make_arms(loss, args, hidden), args.device
    assert abs(arms["chunked"]() / arms["plain"]() - 1) < 1e-4, "both ways compute one loss"
    seconds = in_turn(arms, args.repeats, device)
    ratios = [ours / plain for ours, plain in zip(seconds["chunked"], seconds["plain"])]
    row = {
        **{"loss": loss, "hidden": hidden, "peak_bytes": peaks},
        "memory_ratio": round(peaks["chunked"] / peaks["plain"], 4),
        "median_seconds": {arm: round(statistics.median(values), 4) for arm, values in seconds.items()},
        "time_ratio": round(statistics.median(ratios), 4),
        "time_ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
    }
    print(
        f"{loss}, H={hidden}: peak {peaks['chunked'] / 2**20:.0f} MiB chunked, {peaks['plain'] / 2**20:.0f} MiB plain "
        f"(ratio {row['memory_ratio']}); time ratio {row['time_ratio']} {row['time_ratio_range']}",
        flush=True,
    )
    return row


def run() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--loss", nargs="*", choices=list(LOSSES), help="compare these losses (without a name: all)")
    for name, default in {"windows": 1024, "frames": 8, "labels": 4, "vocab": 32000, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    add_threads(parser)
    parser.add_argument("--device", help="default: cuda if present")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parse_with_config(parser, None, ())
    check_positive(args, "windows", "frames", "labels", "vocab", "repeats", "hidden")
    use_threads(args.threads)
    args.device = one_device(args.device)
    on_gpu = args.device.type == "cuda"
    if args.arm:
        work = make_arms(args.loss[0], args, args.hidden[0])[args.arm]
        print(json.dumps({"peak_bytes": peak_memory(work, args.device)}))
        return
    if args.loss is None:
        parser.error("nothing to measure: add --loss")
    result = {
        "benchmark": "loss",
        "machine": platform.machine(),
        "processor": torch.cuda.get_device_name(args.device) if on_gpu else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{name: getattr(args, name) for name in ("windows", "frames", "labels", "vocab")},
        "rows": [bench_loss(loss, args, hidden) for loss in args.loss or LOSSES for hidden in args.hidden],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(exit_status(run))
