"""Heads that a comparison trains: commands of their own, for equal processor time or equal steps, several at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from draft_heads.data.common.files import write_text
from draft_heads.data.labels.shards import load_distilled
from draft_heads.heads.checkpoint import HEADS, read_config
from draft_heads.inference.evaluation.studies import Study
from draft_heads.train.command import trainer_script
from draft_heads.train.run_folder import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
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

    def check_head(self, folder: str | Path) -> None:
        """ValueError for a head of another kind, or trained with another value of an option that the arm has."""
        config = read_config(folder)
        for name, text in {"kind": self.kind, **self.settings}.items():
            value = config.get(name)
            same = " ".join(map(str, value)) == text if isinstance(value, list) else value == yaml.safe_load(text)
            if name in config and not same:
                raise ValueError(f"{self.name} names a head with {name}={text}; {folder} has {value}; give another")


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
    found = dict[str, Path]()
    for text in words:
        name, _, folder = text.partition("=")
        if name not in arms or not folder or name in found:
            known = ", ".join(arms) or "none"
            raise ValueError(f"--heads takes NAME=RUN/head, NAME one of {known}, each once; got {text!r}")
        arms[name].check_head(folder)  # what cannot be read is told before anything runs
        found[name] = Path(folder)
    return found


@dataclass(frozen=True)
class ArmTrainer:
    """Trains arms below `output`, each in a folder of its name; what is there already is not trained again.

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

    def train(self, arms: Sequence[Arm]) -> dict[str, Path]:
        """Name → folder of the trained head; ValueError if one of that name was trained otherwise."""
        self.output.mkdir(parents=True, exist_ok=True)
        heads = {arm.name: self.output / arm.name / "head" for arm in arms}
        schedule = f"{self.steps} steps" if self.steps else f"{self.minutes:g} minutes" if self.minutes else "recipe"
        begun = any((self.output / arm.name / SETTINGS).is_file() for arm in arms)
        data = [load_distilled(folder).content for folder in self.dataset] if begun else []
        for arm in arms:
            self._check_same(arm, f"{arm.text} ({schedule})", data)
        lacking = [arm for arm in arms if not (heads[arm.name] / "config.json").is_file()]
        seconds = self._step_seconds(lacking) if self.minutes and not self.steps else {}
        with _pool(self.jobs) as pool:
            waiting = []
            for arm in lacking:
                steps = round(self.minutes * 60 / seconds[arm.name]) if seconds and self.minutes else self.steps
                waiting.append((arm, pool.submit(self._run, arm, self.output / arm.name, steps and max(1, steps))))
            for arm, result in waiting:
                print(f"{arm.name}: {result.result() / 60:.1f} processor minutes", flush=True)
        return heads

    def _check_same(self, arm: Arm, made_as: str, data: Sequence[str]) -> None:
        """Note how an arm is trained; ValueError if its folder was begun otherwise, or for another target or data."""
        note, settings = self.output / f"{arm.name}.txt", self.output / arm.name / SETTINGS
        before = note.read_text(encoding="utf-8").strip() if note.is_file() else made_as
        differences = [] if before == made_as else [f"it is {before}, and not {made_as}"]
        if settings.is_file():
            begun = json.loads(settings.read_text(encoding="utf-8"))
            if Path(begun["target"]).resolve() != Path(self.target).resolve():
                differences.append(f"its target is {begun['target']}, and not {self.target}")
            if begun["data"] != list(data):
                differences.append(f"its labels are not those of {' '.join(self.dataset)}")
        if differences:
            folder = self.output / arm.name
            raise ValueError(
                f"{folder} is of another training: {'; '.join(differences)}; take another --output, or remove it"
            )
        write_text(note, made_as + "\n")

    def _step_seconds(self, arms: Sequence[Arm]) -> Mapping[str, float]:
        """Processor seconds of a step of each arm, kept in `step_seconds.json`."""
        file = self.output / "step_seconds.json"
        found: dict[str, float] = json.loads(file.read_text()) if file.is_file() else {}
        short = ("--overwrite", "true", "--simulate_rows", "0", "--held_out", "8")
        for arm in arms:
            if arm.name not in found:
                folder = self.output / "calibration"
                folder.mkdir(exist_ok=True)
                few, many = (self._run(arm, folder / f"{arm.name}-{steps}", steps, *short) for steps in CALIBRATION)
                found[arm.name] = (many - few) / (CALIBRATION[1] - CALIBRATION[0])
                write_text(file, json.dumps(found, indent=1) + "\n")
                print(f"{arm.name}: {found[arm.name]:.3f} processor seconds a step", flush=True)
        return found

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
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_RUNNING):  # which its threads change
                process.terminate()
            raise
