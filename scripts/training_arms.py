"""Heads that a comparison trains: commands of their own, for equal processor time or equal steps, several at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_heads.configs.options import true_or_false
from draft_heads.configs.recipes import RECIPES
from draft_heads.configs.yaml_files import read_yaml
from draft_heads.data.common.files import write_text
from draft_heads.heads.checkpoint import HEADS, head_classes, read_config
from draft_heads.inference.evaluation.made_from import NOTE, content_of, must_be_made
from draft_heads.inference.evaluation.studies import Study, known_studies, read_study
from draft_heads.train.command import trainer_script

ROOT = Path(__file__).resolve().parent.parent
STEP_SECONDS = "step_seconds.json"
CALIBRATION = (20, 80)  # steps of a short and a long run; the difference leaves loading out


class Arm:
    """A head to train: its name, and KIND[,option=value…] of it; a list of values is written with spaces."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.kind, *options = text.split(",")
        if self.kind not in HEADS or not all("=" in option for option in options):
            raise ValueError(
                f"a head to train is KIND[,option=value…], KIND one of {', '.join(sorted(HEADS))}; got {text!r}"
            )
        self.settings = {name: values for name, _, values in (option.partition("=") for option in options)}
        # target_layers=1 2 3 → --target_layers 1 2 3
        self.options = [word for name, values in self.settings.items() for word in (f"--{name}", *values.split())]

    def check_head(self, folder: str | Path, named: Iterable[str]) -> None:
        """ValueError for a head of another kind, or trained with another value of an option that the arm has, or with
        an unusual one of an option that is `named` by other arms."""
        config = read_config(folder)
        for name, text in {"kind": self.kind, **self.settings}.items():
            value = config.get(name)
            if name in config and not is_written(value, text):
                raise ValueError(f"{self.name} names a head with {name}={text}; {folder} has {value}; give another")
        layers = (config.get("target_fingerprint") or {}).get("num_hidden_layers") or 0
        for name in sorted((config.keys() & set(named)) - self.settings.keys()):
            if (value := config[name]) not in (usual := usual_values(self.kind, name, layers)):
                raise ValueError(
                    f"{self.name} names a head with the usual {name}, {' or '.join(map(str, usual))}; {folder} has "
                    f"{value}; give another"
                )


def is_written(value: Any, text: str) -> bool:
    """Whether an option's value is what was written for it, as the trainers read that."""
    if isinstance(value, list):
        return " ".join(map(str, value)) == text
    read = {bool: true_or_false, int: float, float: float}.get(type(value), str)
    try:
        return bool(read(text) == value)
    except ValueError:
        return False


def usual_values(kind: str, name: str, layers: int) -> list[Any]:
    """What an option can be of a head that was trained without it, for a target of so many layers: what the recipe of a
    size or of a paper's target has, and its default where not all of them have it."""
    config = head_classes(kind)[1]
    default = config.usual_layers(layers) if name == "target_layers" else getattr(config, name, None)
    files = [read_yaml(RECIPES / f"{one}.yaml") or {} for one in ("common", "sizes", "papers", kind)]
    found = [] if name in files[0] | files[-1] else [default]
    for file in files:
        sections = [part for key, part in file.items() if isinstance(part, dict) and key != "recipes"]
        for value in (part[name] for part in (file, *sections) if name in part):
            found += [value] if value not in found else []
    return found


def arms_of(studies: Sequence[Study]) -> dict[str, Arm]:
    """Name → arm of all that the studies need; ValueError where two mean different heads by one name."""
    found = dict[str, Arm]()
    for study in studies:
        for name, text in study.heads.items():
            arm = found.setdefault(name, Arm(name, text))
            if arm.text != text:
                raise ValueError(f"{name} is {arm.text} in one study and {text} in {study.name}; run them apart")
    return found


def given_heads(words: Sequence[str], arms: Mapping[str, Arm]) -> dict[str, Path]:
    """Name → folder of the heads of --heads; ValueError for one that is not what its name means in the studies."""
    found, named = dict[str, Path](), dict[str, set[str]]()
    everywhere = arms_of([read_study(name) for name in known_studies()]) if words else {}
    for arm in (*everywhere.values(), *arms.values()):
        named.setdefault(arm.kind, set()).update(arm.settings)
    for text in words:
        name, _, folder = text.partition("=")
        if name not in arms or not folder or name in found:
            known = ", ".join(arms) or "none"
            raise ValueError(f"--heads takes NAME=RUN/head, NAME one of {known}, each once; got {text!r}")
        arms[name].check_head(folder, named[arms[name].kind])  # what cannot be read is told before anything runs
        found[name] = Path(folder)
    return found


@dataclass(frozen=True)
class ArmTrainer:
    """Trains arms below `output`, each in a folder of its name with its log, its run and a note of what that was made
    from; what is there already is not trained again.

    minutes    processor minutes a head, which become steps: a step's processor seconds are measured first, in short
               runs, so that other work on the machine changes neither the steps nor who wins
    steps      steps of every head, instead; without both the recipe's own
    jobs       heads that train at once
    threads    of each
    options    further options of every training
    """

    output: Path
    target: str
    dataset: Sequence[str]
    minutes: float | None = None
    steps: int | None = None
    jobs: int = 1
    threads: int = 1
    options: Sequence[str] = ()

    def lacking(self, arms: Sequence[Arm]) -> list[Arm]:
        """Those still to be trained; ValueError if one of that name was trained otherwise."""
        schedule = f"{self.steps} steps" if self.steps else "recipe"
        if self.minutes and not self.steps:
            schedule = f"{self.minutes:g} minutes, {self.threads} threads"  # which a step's seconds depend on
        made_from: dict[str, Any] = {"schedule": schedule, "target": content_of(self.target)}
        made_from["labels"] = [content_of(Path(folder) / "manifest.json") for folder in self.dataset]
        made_from["options"] = [content_of(word) for word in self.options]
        remedy, found = "remove it, and it is trained again", list[Arm]()
        for arm in arms:
            note = {"head": arm.text, **made_from}
            if must_be_made(self.output / arm.name, "run/head/config.json", note, False, remedy):
                found.append(arm)
        return found

    def train(self, arms: Sequence[Arm]) -> dict[str, Path]:
        """Name → folder of the trained head; ValueError as `lacking`."""
        lacking, folders = self.lacking(arms), {arm.name: self.output / arm.name for arm in arms}
        try:
            seconds = {arm.name: self._step_seconds(arm) for arm in lacking if self.minutes and not self.steps}
        except ValueError:  # whose remedy is another schedule
            for arm in lacking:
                if not (folders[arm.name] / "run").exists():  # nothing was made yet
                    for name in (NOTE, STEP_SECONDS):  # which are of this schedule
                        (folders[arm.name] / name).unlink(missing_ok=True)
            raise
        with _pool(self.jobs) as pool:
            waiting = []
            for arm in lacking:
                steps = self.steps
                if seconds and self.minutes:
                    steps = max(1, round(self.minutes * 60 / seconds[arm.name]))
                waiting.append((arm, pool.submit(self._run, arm, folders[arm.name] / "run", steps)))
            for arm, result in waiting:
                print(f"{arm.name}: {result.result() / 60:.1f} processor minutes", flush=True)
        return {name: folder / "run" / "head" for name, folder in folders.items()}

    def _step_seconds(self, arm: Arm) -> float:
        """Processor seconds of a step of an arm, kept in `step_seconds.json` of its folder."""
        file = self.output / arm.name / STEP_SECONDS
        if not file.is_file():
            short = ("--overwrite", "true", "--simulate_rows", "0", "--held_out", "8")
            few, many = (self._run(arm, file.parent / f"{steps}_steps", steps, *short) for steps in CALIBRATION)
            found = (many - few) / (CALIBRATION[1] - CALIBRATION[0])
            if not found > 0:
                raise ValueError(
                    f"a step of {arm.name} takes less processor time than loading varies by ({few:.1f} and {many:.1f} "
                    f"seconds for {CALIBRATION[0]} and {CALIBRATION[1]} steps); give --steps instead of --minutes"
                )
            write_text(file, f"{found}\n")
            print(f"{arm.name}: {found:.3f} processor seconds a step", flush=True)
        return float(file.read_text(encoding="utf-8"))

    def _run(self, arm: Arm, folder: Path, steps: int | None, *more: str) -> float:
        """Train one head, or go on with it; returns its processor seconds."""
        command = [*trainer_script(arm.kind), "--target", self.target, "--dataset", *self.dataset]
        command += ["--output_dir", str(folder), "--threads", str(self.threads)]
        command += ["--max_steps", str(steps)] if steps else []
        command += ["--eval_strategy", "no"] if steps else []  # time goes into steps
        return cpu_seconds([*command, *arm.options, *self.options, *more], folder.with_suffix(".log"))


_RUNNING: set[subprocess.Popen[bytes]] = set()


def cpu_seconds(command: Sequence[str], log: Path) -> float:
    """Run a script of this project, its output in `log`, and return the processor seconds it took; ValueError if it
    fails."""
    with log.open("w") as out:
        words = [sys.executable, str(ROOT / command[0]), *command[1:]]
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        _RUNNING.add(process)
        with ends_too([process]):
            _, status, usage = os.wait4(process.pid, 0)
        _RUNNING.discard(process)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"{command[0]} failed: {last or 'no message'} (all of its output is in {log})")
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool in which commands wait and run; whatever ends the work inside ends them too."""
    with ThreadPoolExecutor(count) as pool, ends_too(_RUNNING):
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # before what runs ends and makes room
            raise


@contextmanager
def ends_too(processes: Collection[subprocess.Popen[Any]]) -> Iterator[None]:
    """What ends the work inside, as a signal to this process alone, ends these processes."""
    try:
        yield
    except BaseException:
        for process in list(processes):  # which a pool's threads change
            process.terminate()
        raise
