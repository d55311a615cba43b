"""What an evaluation has decoded so far, question by question; in a folder, an interrupted run can go on there.

    OUT/parts/run.json                 what the run measures; another one is refused
    OUT/parts/BENCHMARK-00012.json     the turns of the group of questions that starts with question 12

Several processes may decode the groups of one run, each its share.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from draft_heads.data.common.files import LOCK, lock_folder, read_object, sealed, unsealed, write_text
from draft_heads.data.common.processes import TOKEN
from draft_heads.inference.evaluation.made_from import differences
from draft_heads.inference.generation import Generation

Prompt = tuple[int, ...]
_OWN = re.compile(rf"\.?(run|.+-\d{{5,}})\.json(\.partial)?|{re.escape(TOKEN)}.*")  # a kill leaves the last two


@dataclass(frozen=True)
class Difference:
    """The first position where an answer differs from the oracle's; a token is None where that answer has ended.

    position counts new tokens from 0; gap and noise are None when the length or float64 already decides.
    """

    position: int
    expected: int | None
    received: int | None
    near_tie: bool
    gap: float | None = None
    noise: float | None = None


@dataclass(frozen=True)
class TurnRecord:
    """One answered turn; `difference` is None before judging and when the answer equals the oracle's.

    `scores` are filled in when it is judged: empty but for the last turns of questions that are scored.
    `in_thought` says that the prompt opens the thought that the text begins in.
    `peak_memory` (bytes) and `joules` are a `Meter`'s; turns that were answered together have the same peak and share
    the joules by tokens, as the seconds.
    """

    benchmark: str
    question: int  # index in its benchmark
    question_id: int | str
    category: str | None
    turn: int
    drafter: str
    prompt: Prompt
    text: str
    generation: Generation
    scores: dict[str, float] = field(default_factory=dict)
    difference: Difference | None = None
    peak_memory: int | None = None
    joules: float | None = None
    in_thought: bool = False

    # what `metrics.Turn` asks

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def new_tokens(self) -> int:
        return len(self.generation.tokens)

    @property
    def target_steps(self) -> int:
        return self.generation.target_steps

    @property
    def wall_time(self) -> float | None:
        return self.generation.seconds.get("total")

    @property
    def accept_lengths(self) -> Sequence[int]:
        return self.generation.accept_lengths

    @property
    def accepted(self) -> Sequence[int]:
        return self.generation.accepted

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    @property
    def by_source(self) -> Mapping[int, int]:
        return Counter(self.generation.sources)


@dataclass(frozen=True)
class Group:
    """Questions of a benchmark that every drafter answers before the next group: `start`, `start + 1`, …"""

    benchmark: str
    start: int

    def __str__(self) -> str:
        return f"{self.benchmark}-{self.start:05d}"


@dataclass
class DecodedGroup:
    """What is known of one group.

    run        which run of the program decoded it, and when that was
    records    its turns, of all drafters
    findings   the drafters' own statistics of that run when the group was decoded
    expected   the oracle's answer to every prompt of `records`, when it has given them
    processes  of that run, which share a machine's cores
    threads    of each, and what they do while they wait; "" in groups of older versions
    """

    run: str
    records: list[TurnRecord]
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    expected: dict[Prompt, list[int]] | None = None
    time: float = field(default_factory=time.time)
    processes: int = 1
    threads: str = ""


class DecodedFolder:
    """The decoded groups of a run in a folder, each in a file that appears whole or not at all."""

    def __init__(self, output: Path) -> None:
        self.folder = output / "parts"
        self._groups: dict[Group, DecodedGroup] = {}  # those read or written by this process
        self._lock: TextIO | None = None  # held from `begin` on
        self.settings: dict[str, Any] = {}  # of the run that this process began
        self._run: bytes | None = None  # the run.json of the run that this process is a part of

    def begin(self, settings: dict[str, Any], overwrite: bool) -> None:
        """Start a run, or resume one of the same settings; ValueError naming what differs for another run's groups,
        while another process writes to the folder, and for a file there that no run wrote.

        Groups without run.json, which goes last, are what is left of another run.
        """
        known = self.folder / "run.json"
        self.settings = wanted = json.loads(json.dumps(settings))
        self._lock = lock_folder(self.folder, "--output")
        changed, kept = list[str](), self._files()
        if overwrite:
            for path in sorted(kept, key=known.__eq__):
                path.unlink()
        elif any(self.folder.glob("*-*.json")):  # without groups other settings have made nothing
            there = read_object(known, "add --overwrite") if known.is_file() else None
            changed = ["its run.json is missing"] if there is None else differences(there, wanted)
        if changed:
            raise ValueError(
                f"--output {self.folder.parent} holds an unfinished run with other settings ({'; '.join(changed)}); "
                "repeat those, choose another folder or add --overwrite"
            )
        write_text(known, json.dumps(wanted, indent=2))
        self.join()

    def join(self) -> None:
        """Be a part of the run that another process has begun."""
        self._run = (self.folder / "run.json").read_bytes()

    def discard(self) -> None:
        """Remove what an earlier run has left; ValueError while one runs."""
        if self.folder.is_dir():
            with lock_folder(self.folder, "--output"):
                self._files()
                self.clear()

    def _files(self) -> list[Path]:
        """Those of runs, but for the lock; ValueError where there is another."""
        kept = [path for path in self.folder.iterdir() if path.name != LOCK]
        if other := sorted(path.name for path in kept if not _OWN.fullmatch(path.name)):
            raise ValueError(
                f"--output keeps unfinished runs in {self.folder}, and deletes that folder in the end; it holds "
                f"{other[0]}, which no run wrote; move it away or choose another folder"
            )
        return kept

    def clear(self) -> None:
        """Remove all groups."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def get(self, group: Group) -> DecodedGroup | None:
        """What is known of a group; ValueError for a file that was damaged."""
        path = self._file(group)
        if group not in self._groups and path.is_file():
            try:
                self._groups[group] = _from_json(path.read_bytes(), str(group))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} is damaged ({error}); delete it, and the same command makes it again"
                ) from None
        return self._groups.get(group)

    def put(self, group: Group, decoded: DecodedGroup) -> None:
        """Store what is known of a group and write its file; ValueError where another run has begun in the folder, as a
        process that outlives its launcher finds it."""
        known = self.folder / "run.json"
        if self._run is not None and (not known.is_file() or known.read_bytes() != self._run):
            raise ValueError(
                f"{self.folder} now holds another run, which began while this process was still running: {group} "
                "is not kept; end this run, and give each an --output of its own"
            )
        self._groups[group] = decoded
        answers = decoded.expected
        expected = None if answers is None else [[list(prompt), tokens] for prompt, tokens in answers.items()]
        write_text(self._file(group), sealed({"group": str(group), **asdict(decoded), "expected": expected}))

    def _file(self, group: Group) -> Path:
        return self.folder / f"{quote(str(group), safe=' ')}.json"

    @property
    def kept(self) -> int:
        """The number of groups in the folder."""
        return len(list(self.folder.glob("*-*.json")))

    def resume_hint(self, groups: int) -> str:
        """What an interrupted run has finished, of so many groups, and how to resume it."""
        finished = f"{self.kept} of {groups} groups of questions are kept in {self.folder}"
        return f"{finished}: the same command, without --overwrite, goes on there"


def _from_json(text: bytes, group: str) -> DecodedGroup:
    values = unsealed(text)
    if (found := values.pop("group", group)) != group:
        raise ValueError(f"it is that of {found}")
    records = [
        TurnRecord(**{**turn, "prompt": tuple(turn["prompt"]), "generation": Generation(**turn["generation"])})
        for turn in values["records"]
    ]
    expected = values["expected"]
    if expected is not None:
        expected = {tuple(prompt): tokens for prompt, tokens in expected}
    return DecodedGroup(**{**values, "records": records, "expected": expected})


def total_findings(groups: Sequence[DecodedGroup]) -> dict[str, dict[str, Any]]:
    """The drafters' statistics over all runs of the program, of each its last group's: see `add_findings`."""
    last: dict[str, DecodedGroup] = {}
    for group in sorted(groups, key=lambda group: group.time):
        last[group.run] = group
    return add_findings([group.findings for group in last.values()])


def subtract_counts(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Statistics without the counts that were there `before`; ratios stay."""
    values = {}
    for key, value in found.items():
        if isinstance(value, dict):
            values[key] = subtract_counts(value, before.get(key, {}))
        else:
            values[key] = value - before.get(key, 0) if isinstance(value, int) else value
    return values


def add_findings(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of several drafters or runs together: counts added, ratios averaged."""
    together: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in found for key in one):
        values = [one[key] for one in found if key in one]
        if isinstance(values[0], dict):
            together[key] = add_findings(values)
        else:
            together[key] = sum(values) if isinstance(values[0], int) else sum(values) / len(values)
    return together
