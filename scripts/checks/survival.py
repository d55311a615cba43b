"""Kill training and distillation at many points, resume, and compare with runs that were never killed.

    python scripts/checks/survival.py [--training 100] [--distillation 50] [--seed 0]

Every attempt is a process of its own that ends by SIGKILL: at a random event (a file opened for writing, renamed or
removed, a folder made or removed, a training step or shard done) or at a random moment. The next attempt is the same
command. What must hold: every attempt goes on after the last save; at most one save interval of steps and no finished
shard is lost; the finished head and the finished dataset are those of the undisturbed run, bit for bit. Exit status 0
only then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import runpy
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from draft_heads.configs.command_line import exit_status

import torch
from transformers.trainer_callback import CallbackHandler

from draft_heads.data.labels.shards import ShardFolder, load_distilled
from draft_heads.data.synthetic.corpus import conversations
from draft_heads.train import run as _training  # noqa: F401  (loaded before the attempts are forked)
from draft_heads.train.checkpoints import newest_complete_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "data" / "tiny_target")
SAVE_STEPS, STEPS = 3, 24
SHARD_ROWS, ROWS = 2, 24
_FINISHED = ("holds a finished run", "is already complete")  # the attempt before was killed after its last write
_WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


class Attempt(NamedTuple):
    """How a process ended, and how far it had come.

    killed    by the signal meant for it; False: it finished
    events    watched events in the run's folder
    progress  the last optimizer step, or finished shards, of the whole run; 0: killed before
    first     the first that it did of these; 0: none
    """

    killed: bool
    events: int
    progress: int
    first: int


def attempt(argv: list[str], folder: Path, at_event: int = 0, after_seconds: float = 0.0) -> Attempt:
    """Run a script in a forked process, which kills itself at the n-th event, or after a time, if one is given."""
    shared = mmap.mmap(-1, 24)  # events, progress and first, readable after the process was killed
    log = folder.parent / f"{folder.name}.log"
    child = os.fork()
    if child == 0:
        _in_child(argv, folder, log, shared, at_event, after_seconds)
    _, status = os.waitpid(child, 0)
    events, progress, first = struct.unpack("qqq", shared[:24])
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status != 0:
        text = log.read_text(errors="replace")
        if not any(sentence in text for sentence in _FINISHED):
            raise RuntimeError(f"{' '.join(argv)} failed:\n{text[-3000:]}")
    return Attempt(killed, events, progress, first)


def _in_child(argv: list[str], folder: Path, log: Path, shared: mmap.mmap, at_event: int, after_seconds: float) -> None:
    """The forked process; never returns."""
    events, progress, first, status = 0, 0, 0, 1

    def count(reached: int | None = None) -> None:
        nonlocal events, progress, first
        events += 1
        if reached is not None:
            first, progress = first or reached, reached
        shared[:24] = struct.pack("qqq", events, progress, first)
        if events == at_event:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event not in _WATCHED or not str(args[0]).startswith(str(folder)):
            return
        if event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR):
            count()

    def step_end(self: Any, args: Any, state: Any, control: Any, own: Any = CallbackHandler.on_step_end) -> Any:
        count(state.global_step)
        return own(self, args, state, control)

    def write(self: Any, *args: Any, own: Any = ShardFolder.write) -> None:
        own(self, *args)
        count(shards(folder))

    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.addaudithook(watch)
        CallbackHandler.on_step_end, ShardFolder.write = step_end, write  # type: ignore[method-assign]
        if after_seconds:
            threading.Timer(after_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(bool(stopped.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def survive(
    argv: list[str],
    folder: Path,
    kills: int,
    draw: random.Random,
    saved: Callable[[Path], int],
    interval: int,
    finished: Callable[[Path], list[Path]],
) -> list[str]:
    """Kill a command until `kills` attempts have been killed; sentences for what went wrong.

    saved(folder): progress that must not be lost any more; interval: how much progress lies between two saves;
    finished(folder): files that must be those of the undisturbed run
    """

    def digest() -> str:
        return hashlib.sha256(b"".join(path.read_bytes() for path in finished(folder))).hexdigest()

    start = time.monotonic()
    whole = attempt(argv, folder)
    seconds, wanted = time.monotonic() - start, digest()
    print(f"{folder.name}: undisturbed: {whole.events} events in {seconds:.1f} s", flush=True)
    killed = runs = most_lost = reached = 0
    wrong, history = list[str](), list[str]()
    shutil.rmtree(folder)
    while killed < kills or folder.exists():
        ended = killed >= kills  # the last run finishes
        by_time = draw.random() < 0.4
        event = 0 if by_time or ended else draw.randint(1, max(2, whole.events * 2 // 3))
        moment = draw.uniform(0.3, 0.8) * seconds if by_time and not ended else 0.0
        before = saved(folder) if folder.exists() else 0
        if reached - before > interval:
            wrong.append(f"{reached} were done, {before} kept: more than {interval} lost")
        most_lost = max(most_lost, reached - before)
        this = attempt(argv, folder, event, moment)
        if this.first not in (0, before + 1):
            wrong.append(f"{before} were kept, and the next attempt went on with {this.first}")
        history.append(f"{before} → {this.progress} ({f'event {event}' if event else f'{moment:.2f} s'})")
        if this.killed:
            killed += 1
            reached = max(before, this.progress)
            continue
        runs += 1
        if digest() != wanted:
            wrong.append(f"run {runs} ended with other results than the undisturbed one: {history}")
        lost = f"at most {most_lost} of {interval} lost"
        print(f"{folder.name}: {killed} kills, {runs} runs finished, {lost}", flush=True)
        shutil.rmtree(folder)
        reached, history = 0, []
    return wrong


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=int, default=100, help="kills of a training (default 100)")
    parser.add_argument(
        "--distillation",
        type=int,
        default=50,
        help="kills of distillations, half of them of --labels generate (default 50)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the points at which processes are killed")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process must not need the threads of this one
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        source = base / "conversations.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in conversations(ROWS, 3, "heldout")))
        common = ["--target", TARGET, "--threads", "1"]
        distil = [str(ROOT / "scripts" / "distill.py"), *common, "--dataset", str(source)]
        distil += shlex.split(f"--shard_rows {SHARD_ROWS} --batch_size {SHARD_ROWS} --labels")
        data, wrong = base / "data", list[str]()
        attempt([*distil, "argmax", "--output", str(data)], data)
        for labels, share in (("argmax", options.distillation // 2), ("generate", -(-options.distillation // 2))):
            folder = base / f"distillation of {labels} labels"
            more = ["--max_new_tokens", "12"] if labels == "generate" else []
            wrong += survive(
                [*distil, labels, *more, "--output", str(folder)],
                folder,
                share,
                draw,
                saved=shards,
                interval=0,
                finished=lambda folder: [*sorted(folder.glob("shard-*.arrow")), folder / "manifest.json"],
            )
        load_distilled(str(data))
        run = base / "training"
        train = [str(ROOT / "train" / "ctc.py"), *common, "--dataset", str(data), "--output_dir", str(run)]
        train += shlex.split(
            f"--max_steps {STEPS} --save_steps {SAVE_STEPS} --eval_strategy no --logging_steps 1 "
            "--held_out 4 --simulate_rows 0 --anchors 4 --warmup_steps 2 --per_device_train_batch_size 2"
        )
        wrong += survive(
            train,
            run,
            options.training,
            draw,
            saved=_step,
            interval=SAVE_STEPS,
            finished=lambda folder: [folder / "head" / "model.safetensors", folder / "head" / "config.json"],
        )
    for line in wrong:
        print(line)
    print(json.dumps({"training": options.training, "distillation": options.distillation, "wrong": len(wrong)}))
    return not wrong


def shards(output: Path) -> int:
    """Finished shards of a distillation."""
    manifest = output / "manifest.json"
    listed = json.loads(manifest.read_text())["shards"] if manifest.is_file() else []
    return len({shard["file"] for shard in listed} | {f"{path.stem}.arrow" for path in output.glob("shard-*.json")})


def _step(run: Path) -> int:
    """The step at which a run of this folder would resume."""
    newest = newest_complete_checkpoint(run)
    return int(newest.name.rsplit("-", 1)[1]) if newest else 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
