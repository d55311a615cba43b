"""Rows of JSON arrays, JSONL files (both also as .gz, files also by URL) and datasets, with places for error messages.

A folder of JSON or CSV reads as its files do, those of CSV as texts alone. Rows of Arrow and Parquet are without the
keys that are None, at every depth, for Arrow fills them in; JSON keeps its nulls, also in a column of JSON. Rows count
from 1. A row's place is `line 3` in a JSONL file, `row 3` in an array and `row 3 of split train` in a dataset. Of a
folder one split is read, whole or not at all.
"""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import io
import json
import logging
import re
import urllib.error
import urllib.request
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Any

from draft_heads.data.text.json_files import GZIP, MalformedJson, file_rows, local_rows

logger = logging.getLogger(__name__)

READ = "JSON arrays and JSONL are read: .json, .jsonl, .ndjson, each also as .gz"
_OTHER_FORMATS = {
    *(".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xml", ".yaml", ".yml", ".pkl", ".npy", ".xls", ".xlsx"),
    *(".db", ".sqlite", ".zip", ".tar", ".tgz", ".7z", ".gz", ".bz2", ".xz", ".zst", ".safetensors"),
}
_FOLDER_FORMATS = dict.fromkeys((".json", ".jsonl", ".ndjson"), "JSON")
_FOLDER_FORMATS |= {f".{name}": name for name in ("csv", "tsv", "parquet", "arrow", "zip", "tar")}
_NO_ROWS = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "dummy_data.zip"}
"""The files of a dataset folder that may hold rows, by ending, and names that `datasets` knows to hold none."""
_TEXTS = {"content", "value", "text", "system", "prompt", "instruction", "thinking", "reasoning_content"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_OF_COPIES = {*_COMPRESSED, ".bak", ".old", ".orig", ".copy", ".backup", ".tmp", ".save", ".prev"}
_PART = re.compile(r"[-._](\d{2,})[-_]of[-_](\d{2,})(?=[-._])")  # of `train-00000-of-00002.parquet`
_REMEDY = "; give a .json or .jsonl file, a saved dataset, or the id of one on the hub"


def check_source(source: str) -> None:
    """FileNotFoundError or ValueError for a path whose name says that `read_rows` cannot read it; hub ids pass."""
    if _is_url(source):
        return
    path = Path(source)
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    suffix = (suffix or path.suffix).lower()
    if suffix in _OTHER_FORMATS and not path.is_dir():
        folder = ", or pass a folder with such files alone" if _format_of(path) else ""
        raise ValueError(f"{READ}; received the {suffix} file {source}; write its rows as JSONL{folder}")
    looks_like_path = suffix in {".json", ".jsonl", ".ndjson"} or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)
    if not path.exists() and (looks_like_path or source.startswith(("./", "../"))):
        raise FileNotFoundError(f"{source} does not exist; pass an existing JSON or JSONL file, or a hub id")


def read_rows(
    source: str,
    split: str | None = None,
    config: str | None = None,
    option: str | None = None,
    is_copy: bool = False,
) -> Iterator[tuple[str, Any]]:
    """(place, record) of every row of a file, URL, dataset folder or hub id, read as far as the caller iterates.

    option: that which named the source, for errors; None: --benchmarks
    is_copy: config and split are those of a dataset in whose place this source is read, which may have others

    For a malformed JSONL line, and a row in which an object has a key twice, the record is a MalformedJson. Nothing
    after a malformed row of an array can be read, so there MalformedJson is raised, as it is for an empty file.
    `split` None takes `test`, else the first.
    """
    check_source(source)
    if _is_url(source):
        yield from _url_rows(source, option)
    elif Path(source).is_file():
        yield from local_rows(Path(source))
    else:
        yield from _dataset_rows(source, split, config, option, is_copy)


def is_file(source: str) -> bool:
    """Whether a source is a file here or on a web server, which has no splits."""
    return _is_url(source) or Path(source).is_file()


def _is_url(source: str) -> bool:
    return source.startswith(("https://", "http://"))


def _passed(option: str | None) -> str:
    """How a file is passed."""
    return "NAME=FILE" if option is None else f"{option} FILE"


def _url_rows(url: str, option: str | None) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON or JSONL file on a web server, which is read whole."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read()
        content = gzip.decompress(content) if content.startswith(GZIP) else content
    except (
        OSError,
        HTTPException,
        ValueError,
        EOFError,
        zlib.error,
    ) as error:  # no network, no such file, a damaged one
        raise ValueError(
            f"{url} cannot be read ({error}); copy the file here and pass it as {_passed(option)}"
        ) from None
    yield from file_rows(url, io.BytesIO(content))


def _dataset_rows(
    source: str, split: str | None, config: str | None, option: str | None, is_copy: bool
) -> Iterator[tuple[str, Any]]:
    import datasets  # takes a second

    chosen, saved = None, True
    if (Path(source) / "dataset_info.json").is_file() or (Path(source) / "dataset_dict.json").is_file():
        if config and not is_copy:
            raise ValueError(f"{source} is a saved dataset without configurations; got {config}; leave it out")
        loaded = datasets.load_from_disk(source).with_format(None)  # which may name some of the columns
    else:
        saved = False
        try:
            if Path(source).is_dir():
                _check_folder(source)
                if is_copy and config not in datasets.get_dataset_config_names(source):
                    config = None  # this folder has other parts, or none
            chosen = datasets.load_dataset_builder(source, name=config).config if Path(source).is_dir() else None
            if chosen is not None:
                by_split = {str(name): files for name, files in chosen.data_files.items()}
                wanted = by_split.get(split or _usual_split(by_split), chain(*by_split.values()))
                _check_names(wanted, source)
            loaded = None if chosen is None else _files_of_text(chosen)
            if loaded is None:
                copies = None if chosen is None else _cache_of(chosen)
                loaded = datasets.load_dataset(source, name=config, cache_dir=copies)
        except ConnectionError as error:
            raise ValueError(
                f"{source} is no local file, and the hub cannot be reached ({error}); pass a copy as {_passed(option)}"
            ) from error
        except ValueError as error:
            if not str(error).startswith(("Config name is missing", "BuilderConfig")):
                raise
            reason = " ".join(str(error).split())
            remedy = "pass a copy as NAME=FILE" if option is None else "name one with --dataset_config"
            raise ValueError(f"{source} is read in one of its configurations: {reason}; {remedy}") from None
        except (datasets.exceptions.DatasetsError, FileNotFoundError, RuntimeError) as error:  # the last of a script
            found = "folder" if Path(source).is_dir() else "hub id"
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ValueError(f"{source} is no {found} with rows of one form ({reason}){_REMEDY}") from error
    if is_copy and split is not None:  # a copy may have another split alone, or none
        if not isinstance(loaded, dict):
            split = None
        elif split not in loaded and len(loaded) == 1:
            wanted, (split,) = split, loaded
            logger.warning("%s has no split %s: its split %s is read", source, wanted, split)
    if isinstance(loaded, dict):  # as DatasetDict is
        split = split or _usual_split(loaded)
        if split not in loaded:
            raise ValueError(f"{source} has no split {split!r}; it has: {', '.join(loaded)}")
        others = [name for name in loaded if name != split]
        if others and (Path(source).is_dir() or option is not None):
            logger.warning("%s: its split %s is read, not %s", source, split, ", ".join(others))
        loaded = loaded[split]
        part = chosen.name if chosen is not None else getattr(loaded, "config_name", None)
        unnamed = config is None and option is not None and part is not None and not saved
        if unnamed and len(datasets.get_dataset_config_names(source)) > 1:
            logger.warning("%s: its configuration %s is read; --dataset_config names another", source, part)
    elif split not in (None, "train"):  # train: what distillation asks for by default
        raise ValueError(f"{source} is a saved dataset without splits; got split {split}; leave it out")
    if not isinstance(loaded, _Files) and (mixed := _mixed_text(loaded.features)):
        raise ValueError(
            f'{source} has texts beside other values under {mixed!r}, where datasets reads a text such as "yes" or 42 '
            "as the value that it would be in JSON; download its files and pass their folder, which is read as written"
        )
    rows = loaded if isinstance(loaded, _Files) else (("", _without_none(record, loaded.features)) for record in loaded)
    for row, (where, record) in enumerate(rows, start=1):
        yield f"row {row}" + (f" of split {split}" if split else "") + where, record


def _usual_split(splits: Iterable[str]) -> str:
    """The one that is read where none is named."""
    return "test" if "test" in splits else next(iter(splits))


def _cache_of(chosen: Any) -> str:
    """Where `datasets` keeps its copy of a folder, by size and times of the files of its configuration, also that at
    which each came to be what it is: its own place knows the time that archives and `rsync -a` set."""
    import datasets

    files = chain(*chosen.data_files.values())
    found = [(str(path), Path(path).stat()) for path in files if Path(path).is_file()]
    stated = [(name, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for name, one in found]
    digest = hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:16]
    return str(Path(datasets.config.HF_DATASETS_CACHE) / f"of_folder_{digest}")


def _mixed_text(form: Any, name: str = "") -> str:
    """The name of a column, or key in one, of texts that is kept as JSON values; "" where there is none."""
    if type(form).__name__ == "Json":
        return name if name in _TEXTS else ""
    inner = form.items() if isinstance(form, Mapping) else [(name, getattr(form, "feature", None) or 0)]
    if isinstance(form, list):
        inner = [(name, form[0])]
    return next((found for key, one in inner if one and (found := _mixed_text(one, key))), "")


@dataclass
class _Files:
    """The JSON or CSV files of one split."""

    paths: list[Path]
    csv_options: dict[str, Any]  # of `pandas.read_csv`; what README.md says of the files is among them

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Where a row stands, told of malformed ones only, and the row."""
        for path in self.paths:
            if path.stat().st_size:
                yield from self._json_records(path) if _format_of(path) == "JSON" else self._csv_records(path)

    def _json_records(self, path: Path) -> Iterator[tuple[str, Any]]:
        for place, record in local_rows(path):
            yield f" ({path.name}, {place})" if isinstance(record, MalformedJson) else "", record

    def _csv_records(self, path: Path) -> Iterator[tuple[str, dict[str, str]]]:
        """ValueError for rows of which pandas' usual parser drops quotes within a cell, takes lines from an open quote
        on for one cell, or names each cell as the one before it, the header being shorter."""
        import pandas

        csv.field_size_limit(2**31 - 1)  # 131,072 characters by default
        options = self.csv_options | {"dtype": str, "na_filter": False, "chunksize": 1000, "engine": "python"}  # strict
        try:
            for chunk in pandas.read_csv(path, **options):
                if options.get("index_col") is None and not isinstance(chunk.index, pandas.RangeIndex):
                    raise ValueError("its rows have more fields than its header")
                yield from (("", record) for record in chunk.fillna("").to_dict("records"))  # of a line cut short
        except ValueError as error:
            raise ValueError(
                f"{path} cannot be read as CSV ({str(error).strip()}); mend it, or write its rows as JSONL"
            ) from None


def _files_of_text(chosen: Any) -> dict[str, Any] | None:
    """The files of each split of a folder's configuration, where they are JSON or CSV, of whose texts `datasets` would
    make dates or None; ValueError for archives of such files."""
    found = {str(split): [Path(file) for file in files] for split, files in chosen.data_files.items()}
    archive = next((path for path in chain(*found.values()) if _format_of(path) in ("zip", "tar")), None)
    if archive and type(chosen).__name__ in ("CsvConfig", "JsonConfig"):
        raise ValueError(
            f"the texts of JSON and CSV files are read as written, which those in an archive, {archive}, would not be: "
            'datasets reads "NA" as no text and "2024-05-01" as a date; unpack it'
        )
    readable = all(path.is_file() and _format_of(path) in ("JSON", "csv", "tsv") for path in chain(*found.values()))
    if not readable or getattr(chosen, "field", None) is not None:
        return None
    options = getattr(chosen, "pd_read_csv_kwargs", {})
    return {split: _Files(paths, options) for split, paths in found.items()}


def _check_folder(source: str) -> None:
    """ValueError for a folder of which `datasets` would not read all rows of a split, without a word.

    It reads the files of the most frequent format, and where files are named for a split, only those. README.md may
    name the files (`configs:`): then others are left out on purpose.
    """
    import datasets

    base = Path(source).resolve()
    if _names_its_files(base):
        return
    seen = [path for path in sorted(base.rglob("*")) if not _is_hidden(path.relative_to(base))]
    by_format: dict[str, list[Path]] = defaultdict(list)
    for path in seen:
        a_file = path.is_file() or path.is_symlink()  # a link may lead nowhere
        if a_file and path.name not in _NO_ROWS and (found := _format_of(path)):
            by_format[found].append(path)
    if len(by_format) > 1:
        received = "; ".join(f"{name}: {_listed(paths, base)}" for name, paths in by_format.items())
        raise ValueError(
            f"the rows of a folder are in one format, {source} has several ({received}); convert the files or move "
            "those of other formats out"
        )
    read = {Path(file) for files in datasets.load_dataset_builder(source).config.data_files.values() for file in files}
    reached = read | {folder for path in read for folder in path.parents}
    linked = [path for path in seen if path.is_symlink() and path.is_dir()]  # `datasets` does not follow these
    if unread := [path for path in chain(*by_format.values(), linked) if path not in reached]:
        raise ValueError(
            f"each file of rows in a folder belongs to a split; in {source}, {_listed(unread, base)} would not be read "
            f"beside {_listed(sorted(read), base)}: name them alike (train-2.jsonl), move them out, or list the files "
            "under configs: in README.md"
        )


def _check_names(files: Iterable[Any], source: str) -> None:
    """ValueError for files of a split whose names say that one is another's copy, or that parts of it are missing."""
    plain, parts = dict[Path, Path](), defaultdict[tuple[Path, str], dict[tuple[str, ...], Path]](dict)
    paths = sorted(path for path in map(Path, files) if path.is_file())  # README.md may name addresses
    names = set(paths)
    for path in paths:
        bare = path
        while (after := _after_format(bare)) and after[-1].lower() in _COMPRESSED:
            bare = bare.with_suffix("")
        original = bare.with_name(bare.name.removesuffix("".join(after)))
        counted = any(re.fullmatch(r"\.\d{1,3}", suffix) for suffix in after)  # log.json.1 and log.json.2.gz are parts
        is_copy = _OF_COPIES.issuperset(map(str.lower, after)) or (original in names and not counted)
        same = plain.setdefault(original if is_copy else bare, path)
        if part := _PART.search(path.name):
            before = parts[path.parent, path.name[: part.start()]]
            same = same if same != path else before.setdefault(part.groups(), path)
        if same != path:
            raise ValueError(
                f"a file of rows is in a folder once; in {source}, {same.name} and {path.name} would both be read, and "
                "their names are those of a file and its copy; move one of them out, or rename it"
            )
    for (folder, name), read in parts.items():
        counts = sorted({count for _, count in read})
        formats = {_format_of(path) for path in read.values()}
        whole = (path for path in folder.glob(f"{glob.escape(name)}*") if _is_whole(path, formats))
        named = (_PART.match(path.name, len(name)) for path in whole)
        there = {part.groups() for part in named if part and part[2] in counts}
        if len(counts) > 1 or len(there) != int(counts[0]):
            told = " and ".join(f"{int(count)} parts" for count in counts)
            raise ValueError(
                f"a split is read with all its parts, and once; in {source}, the names of {name}… tell of {told}, and "
                f"{len(there)} are there ({min(read.values()).name} …); fetch the others, or rename (part-1.jsonl)"
            )


def _is_whole(path: Path, formats: Collection[str | None]) -> bool:
    """Whether a part is a file of one of these formats that is neither empty nor still on its way, by its name."""
    whole = path.is_file() and path.stat().st_size > 0 and _format_of(path) in formats
    return whole and _COMPRESSED.issuperset(map(str.lower, _after_format(path)))


def _names_its_files(folder: Path) -> bool:
    """Whether a folder says which files are those of its splits."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    header = re.match(r"\s*---\n(.*?)\n---", text, re.DOTALL)
    named = header is not None and re.search(r"^configs:", header[1], re.MULTILINE) is not None
    return named or (folder / ".huggingface.yaml").is_file()


def _is_hidden(path: Path) -> bool:
    """Whether `datasets` passes a path over: `.cache`, `__pycache__`."""
    return any(part.startswith(".") for part in path.parts) or any(part.startswith("__") for part in path.parent.parts)


def _format_of(path: Path) -> str | None:
    ends = [suffix.lower() for suffix in reversed(path.suffixes)]
    return next((_FOLDER_FORMATS[end] for end in ends if end in _FOLDER_FORMATS), None)


def _after_format(path: Path) -> list[str]:
    """What stands in a file's name behind its format. Example: [".gz"] of `train.jsonl.gz`."""
    ends = [number for number, suffix in enumerate(path.suffixes, 1) if suffix.lower() in _FOLDER_FORMATS]
    return path.suffixes[ends[-1] :] if ends else []


def _listed(paths: Sequence[Path], base: Path) -> str:
    """The first three paths and how many more there are."""
    names = [str(path.relative_to(base)) for path in paths[:3]]
    return ", ".join([*names, *([f"{len(paths) - 3} more"] if len(paths) > 3 else [])])


def _without_none(value: Any, form: Any) -> Any:
    """A value without the keys that are None: Arrow gives every object the keys that another row's has.

    form: its type among the columns of the dataset; one of `datasets.Json` is as it was written, with its nulls
    """
    if isinstance(value, dict) and isinstance(form, dict):
        return {key: _without_none(one, form[key]) for key, one in value.items() if one is not None}
    each = form[0] if isinstance(form, list) else getattr(form, "feature", None)
    return [_without_none(one, each) for one in value] if isinstance(value, list) else value
