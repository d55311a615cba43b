"""A folder of labelled conversations: Arrow shards and a manifest. A run killed at any time loses no finished shard.

    OUT/shard-00000.arrow …           columns id, conversation, input_ids, assistant_mask, greedy_ids [, hidden …]
    OUT/shard-00001.answers.jsonl …   the answers of a shard that is not finished (`answer_journal`)
    OUT/manifest.json                 the settings, one entry per finished shard, counts, whether it is complete

A shard is written under a temporary name, flushed to disk and renamed; then an entry for it is written beside it. The
manifest collects the entries, so every shard in it is whole, and a new run makes those that are missing. Several
processes may write shards of one folder; the first of them begins and finishes it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import datasets
import pyarrow as pa

from draft_heads.data.common.files import (
    LOCK,
    checksum,
    lock_folder,
    names_path,
    sealed,
    unsealed,
    write_text,
)
from draft_heads.data.common.processes import TOKEN, Processes
from draft_heads.data.common.program import changes
from draft_heads.data.labels.answer_journal import count_answers
from draft_heads.data.labels.manifest import (
    FORMAT_VERSION,
    HEADER,
    MANIFEST,
    REMEDY,
    differences,
    is_manifest,
    read_distilled_manifest,
)
from draft_heads.data.labels.questions import NAMED_BY

logger = logging.getLogger(__name__)

_BEFORE_SHARDS = re.compile(rf"\.{re.escape(MANIFEST)}\.partial|{re.escape(LOCK)}|{re.escape(TOKEN)}.*")
_OWN_FILES = re.compile(
    rf"{re.escape(MANIFEST)}|{_BEFORE_SHARDS.pattern}"
    r"|\.?shard-\d{5,}(\.[0-9a-f]{32})?\.(arrow|arrow\.tmp|json|json\.partial|answers\.jsonl|answers\.jsonl\.partial)"
)
"""What a distillation has in its folder; those before shards also where a kill has left no manifest."""
_JOURNAL = ".answers.jsonl"


@dataclass
class DistilledDataset:
    """`dataset`: memory-mapped rows; `manifest`: see the docstring of `data.labels.distill`."""

    dataset: datasets.Dataset
    manifest: dict[str, Any]

    @property
    def hidden_dtype(self) -> str | None:
        """Type of the cached hidden states (`float32`, `float16`, `bfloat16`), None when there are none."""
        return self.manifest["settings"].get("hidden_states")

    @property
    def content(self) -> str:
        """Digest of the shards' checksums; changes if any row changes."""
        sums = " ".join(str(shard.get("xxh3")) for shard in self.manifest["shards"])
        return hashlib.sha256(sums.encode()).hexdigest()[:16]

    @property
    def target_layers(self) -> list[int]:
        """The layers whose outputs are cached beside the hidden states."""
        return list(self.manifest["settings"].get("target_layers") or [])


class ShardFolder:
    """The writing side of one output folder."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._lock: TextIO | None = None  # held while this process may write
        self._goes_on = False  # whether the folder's manifest is that of the same command

    @classmethod
    def join(cls, output: str) -> ShardFolder:
        """Write to a folder that another process has begun."""
        return cls(Path(output), read_distilled_manifest(Path(output)))

    @classmethod
    def open(
        cls, output: str, header: dict[str, Any], overwrite: bool, program: dict[str, Any] | None = None
    ) -> ShardFolder:
        """Start an output, or continue one of the same command; ValueError for one of which another made a part.

        program: which makes what is missing; a line tells what it has other than the one before

        `header` holds the manifest's `HEADER` fields; two commands are the same when all of them are equal, but for
        `skip_bad_rows`, which a later one may add.
        """
        folder = Path(output)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output {output} is a file; pass a folder")
        goes_on = (folder / MANIFEST).exists() and not overwrite
        there = folder.iterdir() if folder.exists() and not goes_on else ()
        own = _OWN_FILES if is_manifest(folder / MANIFEST) else _BEFORE_SHARDS
        if foreign := sorted(path.name for path in there if not own.fullmatch(path.name)):
            raise ValueError(f"output {output} holds other files ({', '.join(foreign[:3])}); pass a new folder")
        fresh = {"format_version": FORMAT_VERSION, **header, "named_by": NAMED_BY}
        fresh |= {"programs": [program] if program else [], "shards": [], "counts": {}, "complete": False}
        opened = cls(folder, fresh)
        opened._lock = lock_folder(folder, "output")
        if not goes_on:
            return opened
        opened.manifest = read_distilled_manifest(folder)
        for unfinished in opened._own("*.arrow.tmp"):  # of a killed run, which may have filled the disk
            unfinished.unlink()
        opened.collect()
        opened._goes_on = bool(opened.manifest["shards"]) or any(map(count_answers, opened._journals()))
        if not opened._goes_on:  # other settings have made nothing
            opened.manifest = fresh
        elif header["settings"].get("skip_bad_rows"):  # what was made before a bad row ended the run is the same
            opened.manifest["settings"]["skip_bad_rows"] = True
        if different := differences(opened.manifest, header):
            raise ValueError(
                f"output {output} holds another distillation: {'; '.join(different)}; set overwrite to "
                "replace it, or pass another output"
            )
        damaged = {shard["file"]: wrong for shard in opened.manifest["shards"] if (wrong := _damage(folder, shard))}
        if damaged:
            logger.warning("made again: %s", "; ".join(f"{file} {wrong}" for file, wrong in damaged.items()))
            shards = [shard for shard in opened.manifest["shards"] if shard["file"] not in damaged]
            opened.manifest |= {"shards": shards, "complete": False}
        if opened.manifest["complete"]:
            raise ValueError(f"output {output} is already complete; set overwrite to make it again")
        before = opened.manifest.setdefault("programs", [{}])  # older versions noted none
        if program and program not in before[-1:]:
            told = changes(before[-1] if before else program, program)
            logger.warning("output %s: what is missing is made by another program than the rest: %s", output, told)
            before.append(program)
        return opened

    def begin(self) -> None:
        """Remove shards that the manifest does not list, and temporary files; write the manifest.

        The answers of unfinished shards stay where the manifest on disk is that of the same command.
        """
        for path in self._leftovers():
            path.unlink()
        self._save()  # last, on a disk that may have been full; until then shards that are missing are made again

    def space_to_free(self) -> int:
        """Bytes of what `begin` will remove."""
        return sum(path.stat().st_size for path in self._leftovers())

    def _leftovers(self) -> list[Path]:
        """Files of ours that are neither finished shards nor answers of this command's unfinished ones; shards last,
        as a run that goes on would take entries of shards and answers for its own."""
        kept = self._journals() if self._goes_on else []
        finished = [shard["file"] for shard in self.manifest["shards"]]
        journals = [path.name for path in kept if path.name.replace(_JOURNAL, ".arrow") not in finished]
        named = {MANIFEST, LOCK, *finished, *journals}
        left = [path for path in self._own("*") if path.name not in named]
        return sorted(left, key=lambda path: ".arrow" in path.name)

    def missing(self, rows: int, shard_rows: int) -> list[range]:
        """The source rows of every shard that is not finished, of `rows` in all."""
        finished = {shard["first_row"] for shard in self.manifest["shards"]}
        firsts = [first for first in range(0, rows, shard_rows) if first not in finished]
        return [range(first, min(first + shard_rows, rows)) for first in firsts]

    def journal(self, first_row: int) -> Path:
        """The file of the answers of a shard that is not finished; the shard, once written, replaces it."""
        return self._path(first_row).with_suffix(_JOURNAL)

    def _path(self, first_row: int) -> Path:
        number = first_row // self.manifest["settings"]["shard_rows"]
        return self.folder / f"shard-{number:05d}.arrow"

    def _journals(self) -> list[Path]:
        return self._own(f"shard-*{_JOURNAL}")

    def _own(self, pattern: str) -> list[Path]:
        """Files of ours, in order."""
        return sorted(path for path in self.folder.glob(pattern) if _OWN_FILES.fullmatch(path.name))

    def write(
        self, rows: Iterable[dict[str, Any]], entry: dict[str, Any], counts: dict[str, int], states: Sequence[str] = ()
    ) -> None:
        """Write one shard; `entry` (first_row, source_rows, skipped …) is added to the manifest as it is.

        A shard that another process has finished meanwhile is kept instead. ValueError where another distillation has
        begun in the folder, as when a process outlives a launcher that was killed.

        states: the columns of raw bytes, an [L, ·] tensor each, its type in the manifest
        """
        path = self._path(entry["first_row"])
        temporary = path.with_suffix(f".{uuid4().hex}.arrow.tmp")  # a process of an earlier run may still be writing
        columns: dict[str, Any] = {
            "id": datasets.Value("string"),
            "conversation": datasets.Value("string"),
            "input_ids": datasets.List(datasets.Value("int32")),
            "assistant_mask": datasets.List(datasets.Value("bool")),
            "greedy_ids": datasets.List(datasets.Value("int32")),
            **dict.fromkeys(states, datasets.Value("large_binary")),
        }
        schema = datasets.Features(columns).arrow_schema
        written = 0
        with names_path(path), temporary.open("wb") as file:
            with pa.ipc.new_stream(file, schema) as stream:
                rows, size = iter(rows), 1 if states else 256
                while batch := list(itertools.islice(rows, size)):
                    cells = {key: [row[key] for row in batch] for key in schema.names}
                    stream.write_batch(pa.RecordBatch.from_pydict(cells, schema=schema))
                    written += len(batch)
            file.flush()
            os.fsync(file.fileno())
        on_disk = read_distilled_manifest(self.folder)
        own = json.loads(json.dumps({key: self.manifest.get(key) for key in HEADER}))  # without tuples
        if any(on_disk.get(key) != own[key] for key in HEADER):
            temporary.unlink()
            raise ValueError(
                f"{self.folder} now holds another distillation, which began while this process was still running: "
                f"{path.name} is not written; end this run, and give each an output of its own"
            )
        if path.exists():
            temporary.unlink()
            logger.warning("%s was finished by another process; that one is kept", path)
            return
        temporary.replace(path)
        status = path.stat()
        file_of = {"file": path.name, "rows": written, "bytes": status.st_size}
        file_of["xxh3"] = _checksum(path, status.st_mtime_ns)
        entry = {**file_of, **entry, "counts": counts}
        write_text(path.with_suffix(".json"), sealed(entry))
        self.journal(entry["first_row"]).unlink(missing_ok=True)

    def collect(self) -> None:
        """Take the shards that any process has finished into the manifest; one of a damaged entry is made again."""
        entries = self._own("shard-*.json")
        if entries:
            found = []
            for path in entries:
                try:
                    found.append(unsealed(path.read_bytes(), ("first_row", "file", "bytes", "rows", "counts")))
                except ValueError as error:
                    logger.warning("%s is damaged (%s): its shard is made again", path, error)
            shards = {shard["first_row"]: shard for shard in [*self.manifest["shards"], *found]}
            self.manifest["shards"] = [shards[first] for first in sorted(shards)]
            self._save()
            for path in entries:
                path.unlink()

    def resume_hint(self) -> str:
        """What an interrupted run has finished, and how to resume it."""
        self.collect()
        done = sum(shard["source_rows"] for shard in self.manifest["shards"])
        answers = sum(map(count_answers, self._journals()))
        if not done and not answers:
            return "no shard was finished: the same command starts again (--shard_rows N makes smaller ones)"
        kept = [f"{done} of {self.manifest['data']['rows']} conversations"] if done else []
        kept += [f"{answers} answers of {'others' if done else 'conversations'}"] if answers else []
        done_so_far = f"{' and '.join(kept)} are done and kept in {self.folder}"
        return f"{done_so_far}: the same command, without --overwrite, goes on there"

    def finish(self) -> None:
        """Mark the folder complete; ValueError if a shard is missing."""
        self.collect()
        if self.missing(self.manifest["data"]["rows"], self.manifest["settings"]["shard_rows"]):
            raise ValueError(
                f"{self.folder} lacks shards of a process that ended early; the same command, without "
                "--overwrite, makes them"
            )
        self.manifest["complete"] = True
        self._save()
        (self.folder / LOCK).unlink(missing_ok=True)

    def _save(self) -> None:
        totals: Counter[str] = Counter()
        for shard in self.manifest["shards"]:
            totals.update(shard["counts"])
        trained = totals["trained_tokens"]
        agreement = round(totals["agreeing_tokens"] / trained, 6) if trained else None
        self.manifest["counts"] = {**totals, "agreement": agreement}
        write_text(self.folder / MANIFEST, json.dumps(self.manifest, indent=1, ensure_ascii=False))


def load_distilled(path: str) -> DistilledDataset:
    """Open a finished output of `distill`; ValueError when it is missing, unfinished or damaged.

    Of several processes that can wait for each other all must open it: they share the reading of its checksums.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{path} has no {MANIFEST}; pass the output folder of scripts/distill.py")
    manifest = read_distilled_manifest(folder)
    if not manifest["complete"]:
        done = len(manifest["shards"])
        raise ValueError(
            f"{path} is not complete ({done} shards written); the same scripts/distill.py command, without "
            "--overwrite, goes on there"
        )
    processes, damage = Processes.current(), None
    node = processes.on_this_node()
    for number, shard in enumerate(manifest["shards"]):  # each process of a node reads its share
        if wrong := _damage(folder, shard, read=number % node.count == node.rank):
            damage = f"{folder / shard['file']} {wrong}"
            break
    if (damage := processes.first_of(damage)) is not None:
        raise ValueError(f"{damage}; the same scripts/distill.py command, without --overwrite, makes this shard again")
    files = [str(folder / shard["file"]) for shard in manifest["shards"] if shard["rows"]]
    rows = sum(shard["rows"] for shard in manifest["shards"])
    if not (files or manifest["counts"].get("rows")):
        raise ValueError(f"{path} holds no rows: all {manifest['counts'].get('skipped', 0)} were skipped")
    found = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files]) if files else []
    if not len(found) == rows == manifest["counts"].get("rows", rows):
        raise ValueError(
            f"{folder / MANIFEST} is damaged: its shards have {len(found)} rows, and it says {rows} of them and "
            f"{manifest['counts'].get('rows')} of all; {REMEDY}"
        )
    return DistilledDataset(found, manifest)


def _damage(folder: Path, shard: dict[str, Any], read: bool = True) -> str | None:
    """What is wrong with the file of a shard, None for nothing; older manifests have no checksum to compare.

    read: whether its content is read for that; its size is always compared.
    """
    path = folder / shard["file"]
    if not path.is_file():
        return "is missing"
    status = path.stat()
    if status.st_size != shard["bytes"]:
        return f"has {status.st_size} bytes instead of {shard['bytes']}"
    if read and "xxh3" in shard and _checksum(path, status.st_mtime_ns) != shard["xxh3"]:
        return "has other content than was written (its checksum differs)"
    return None


@functools.cache
def _checksum(path: Path, changed: int) -> str:
    """Of a file's content; `changed` is its time stamp, so that a file is read once."""
    return checksum(path)


def check_apart(source: str, output: str) -> None:
    """ValueError for an output that is, holds or is inside the folder or file of the conversations."""
    read, written = Path(source).resolve(), Path(output).resolve()
    if read.exists() and (read.is_relative_to(written) or written.is_relative_to(read)):
        raise ValueError(
            f"output must be a folder apart from the conversations, or a later run replaces them; got {output} "
            f"and {source}; name a new one"
        )
