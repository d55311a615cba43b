"""Training benchmarks. The last line of output is one JSON object.

    python scripts/bench/train.py --loss [--windows 1024 --frames 8 --labels 4 --vocab 32000 --hidden 256 1024]

`--loss` compares the fused CTC loss with `log_softmax` + `F.ctc_loss`, forward and backward, the LM-head product in
both. Peak memory is measured above the inputs, each arm in a process of its own; times are interleaved in one process.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from draft_heads.data.config_file import exit_status

import torch

from draft_heads.data.options import add_threads, use_threads
from draft_heads.heads.losses import ctc_loss_fused, ctc_loss_reference
from draft_heads.scripts.bench.decode import in_turn
from draft_heads.scripts.decoding_options import script_parser

ARMS = ("fused", "reference")


def make_arm(name: str, args: argparse.Namespace, hidden: int) -> Callable[[], float]:
    """A function that runs one forward and backward pass and returns the loss."""
    torch.manual_seed(0)
    with torch.device(args.device):
        frames = torch.randn(args.windows, args.frames, hidden).requires_grad_()
        lm_head = torch.randn(args.vocab, hidden) * hidden**-0.5
        weight, bias = torch.zeros(hidden).requires_grad_(), torch.full((), 8.0).requires_grad_()
        labels = torch.randint(0, args.vocab, (args.windows, args.labels))
        lengths = torch.full((args.windows,), args.labels)
        closed = torch.ones(args.windows, dtype=torch.bool)

    def run() -> float:
        for leaf in (frames, weight, bias):
            leaf.grad = None
        if name == "fused":
            loss, _ = ctc_loss_fused(frames, weight, bias, lm_head, labels, lengths, closed)
        else:
            blank = (frames @ weight + bias)[..., None]
            log_probs = torch.cat([frames @ lm_head.T, blank], -1).log_softmax(-1)
            loss, _ = ctc_loss_reference(log_probs, labels, lengths, closed)
        loss.backward()
        return float(loss)

    return run


def peak_memory(name: str, args: argparse.Namespace, hidden: int) -> int:
    """Bytes at the peak of one pass above what was there before it."""
    run = make_arm(name, args, hidden)
    if args.device == "cuda":
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    clear.write_text("5")  # resets the resident set's high-water mark
    before = int(status.read_text().split("VmRSS:")[1].split()[0])
    run()
    return 1024 * (int(status.read_text().split("VmHWM:")[1].split()[0]) - before)


def bench_loss(args: argparse.Namespace, hidden: int) -> dict[str, object]:
    """Peak bytes and median seconds of both arms at one hidden size, and their ratios; the row is printed too."""
    peaks = {}
    for name in ARMS:
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", name, "--hidden", str(hidden)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name] = json.loads(done.stdout.splitlines()[-1])["peak_bytes"]
    device = torch.device(args.device)
    seconds = in_turn({name: make_arm(name, args, hidden) for name in ARMS}, args.repeats, device)
    ratios = [f / r for f, r in zip(seconds["fused"], seconds["reference"])]
    row = {
        **{"hidden": hidden, "peak_bytes": peaks},
        "memory_ratio": round(peaks["fused"] / peaks["reference"], 4),
        "median_seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "time_ratio": round(statistics.median(ratios), 4),
        "time_ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
    }
    print(
        f"H={hidden}: peak {peaks['fused'] / 2**20:.0f} MiB fused, {peaks['reference'] / 2**20:.0f} MiB reference "
        f"(ratio {row['memory_ratio']}); time ratio {row['time_ratio']} {row['time_ratio_range']}",
        flush=True,
    )
    return row


def run() -> None:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--loss", action="store_true", help="compare the CTC losses")
    for name, default in {"windows": 1024, "frames": 8, "labels": 4, "vocab": 32000, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    add_threads(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    use_threads(args.threads)
    if args.arm:
        print(json.dumps({"peak_bytes": peak_memory(args.arm, args, args.hidden[0])}))
        return
    if not args.loss:
        parser.error("nothing to measure: add --loss")
    result = {
        "benchmark": "ctc_loss",
        "machine": platform.machine(),
        "processor": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{name: getattr(args, name) for name in ("windows", "frames", "labels", "vocab")},
        "rows": [bench_loss(args, hidden) for hidden in args.hidden],
    }
    print(json.dumps(result))


def main() -> int:
    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
