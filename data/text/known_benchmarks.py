"""Benchmarks known by name, each described by one file of `configs/benchmarks`; a user's own file is like them.

    source: EdinburghNLP/xsum       a hub id, a URL of a JSONL file, or a file, relative to this one's folder
    config: main                    the part of a hub dataset that is read (default: its only one)
    split: test                     the split that is read (default: test, else the first)
    keys: [document, summary]       a file whose first row has these keys has this benchmark's rows; `a.b` is the key b
                                    of the object under the key a
    recognised_by: [id]             further keys that it has where the benchmark is not named: `keys` alone are those of
                                    other files too
    prompt: "…\\n\\n{document}"       the user's message: {KEY} is the row's text under that key, which may have spaces
    optional: [input]               keys without which, or with an empty text, their paragraph of the prompt is left out
    reference: summary              the key of the correct answer
    id: id                          the key of the question's id (default: question_id, prompt_id or id, else its place)
    unread: [text]                  further keys of the rows, which the prompt does not need
    score: rouge2                   accuracy, rouge2 or pass_at_1 (which reads `prompt`, `entry_point` and `test`)
    columns: {math: [algebra]}      categories that reports count together, by the name of their row

Only `source` is required. Without `prompt` the rows have one of the forms of `data.text.benchmarks`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from draft_heads.configs.yaml_files import read_yaml

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "benchmarks"
SCORES = {"accuracy": "accuracy", "rouge2": "ROUGE-2 (F)", "pass_at_1": "pass@1"}
"""Name of a score → what reports call it."""
_TEXTS = ("source", "config", "split", "prompt", "reference", "id", "score")
_LISTS = ("keys", "recognised_by", "optional", "unread")
_NAME = r"[\w.]+"
"""What is taken for the name of a key between braces, whether or not there is one."""
_FORMATTED = re.compile(r"\{(\s*([^{}!:|\[\s](?:[^{}!:|\[]*[^{}!:|\[\s])?)\s*([!:|\[][^{}\s,]*)?)\}")
"""Between braces: a name, maybe in other white space, and what Python or Jinja would do with its text."""


@dataclass(frozen=True)
class Description:
    """What a benchmark's file says; the fields are its keys."""

    name: str
    source: str
    config: str | None = None
    split: str | None = None
    keys: tuple[str, ...] = ()
    recognised_by: tuple[str, ...] = ()
    prompt: str | None = None
    optional: tuple[str, ...] = ()
    reference: str | None = None
    id: str | None = None
    unread: tuple[str, ...] = ()
    score: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # category → row of the report

    @property
    def used(self) -> set[str]:
        """The keys of a row that the benchmark knows."""
        named = {key for key in (self.reference, self.id) if key is not None}
        return {*self.keys, *self.recognised_by, *self.optional, *self.unread, *named}

    @cached_property
    def placeholder(self) -> re.Pattern[str]:
        """A {KEY} of the prompt: any of the keys that it may have, or what looks like one."""
        known = sorted(map(re.escape, {*self.keys, *self.optional}), key=len, reverse=True)
        return re.compile(rf"\{{({'|'.join([*known, _NAME])})\}}")

    def has_form_of(self, row: Mapping[str, Any], named: bool = True) -> bool:
        """Whether a row is one that `prompt` is for; `named`: its file is said to be of this benchmark."""
        wanted = {*self.keys, *(() if named else self.recognised_by)}
        return self.prompt is not None and wanted <= self.flattened(row).keys()

    def flattened(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with an entry `a.b` for each key of an object `a` of which the benchmark knows a key."""
        outer = {key.partition(".")[0] for key in self.used if "." in key}
        nested = {key: row[key] for key in outer if isinstance(row.get(key), dict)}
        inner = {f"{key}.{name}": value for key, found in nested.items() for name, value in found.items()}
        return {key: value for key, value in row.items() if key not in nested} | inner

    def prompt_of(self, row: Mapping[str, Any]) -> str:
        """The user's message; a list is written one entry a line.

        Example: `{a}\\n\\n{b}`, b optional, of {"a": "Add.", "b": ""} is `Add.`.
        """
        assert self.prompt is not None
        empty = {key for key in self.optional if row.get(key) in (None, "", [])}
        paragraphs = [part for part in self.prompt.split("\n\n") if not empty & set(self.placeholder.findall(part))]
        return self.placeholder.sub(lambda found: written(row[found[1]]), "\n\n".join(paragraphs))


@cache
def known_benchmarks() -> Mapping[str, Description]:
    """The benchmarks of `configs/benchmarks` by name."""
    return {path.stem: read_description(path) for path in sorted(FOLDER.glob("*.yaml"))}


def is_description(source: str) -> bool:
    """Whether a benchmark's source is the path of a file that describes it."""
    return Path(source).suffix in (".yaml", ".yml")


def named_benchmark(text: str) -> tuple[str, str] | None:
    """(name, path of its description) of a known benchmark's name or a description's path; None for any other text."""
    if text in known_benchmarks():
        return text, str(FOLDER / f"{text}.yaml")
    return (Path(text).stem, text) if is_description(text) else None


def describe(name: str, source: str) -> tuple[Description | None, str]:
    """(description, where its rows are) of a benchmark: a description itself, or a known one by its name or hub id."""
    if is_description(source):
        described = read_description(Path(source))
        return described, described.source
    known = known_benchmarks()
    return known.get(name) or next((one for one in known.values() if one.source == source), None), source


def read_description(path: Path) -> Description:
    """The description in a file; ValueError names the file and the key that is wrong."""
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a YAML file that describes it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    valid = [one.name for one in fields(Description) if one.name != "name"]
    if not isinstance(content, dict):
        raise ValueError(f"{path} maps keys to values, received {type(content).__name__}; write source: FILE|ID")
    if unknown := [str(key) for key in content if key not in valid]:
        raise ValueError(f"{path}: unknown {', '.join(unknown)}; valid keys: {', '.join(valid)}")
    content = {key: value for key, value in content.items() if value is not None}
    for key, value in content.items():
        if key in _TEXTS and not (isinstance(value, str) and value):
            raise ValueError(f"{path}: {key} is a text, received {value!r}; put it in quotes")
        if key in _LISTS and not _is_list_of_texts(value):
            raise ValueError(f"{path}: {key} is a list of texts, received {value!r}")
    if "source" not in content:
        raise ValueError(f"{path}: source is required, received only {', '.join(content) or 'nothing'}")
    lists = {key: tuple(content[key]) for key in _LISTS if key in content}
    columns = _columns(path, content.get("columns", {}))
    found = Description(path.stem, **(content | lists | {"columns": columns, "source": _source(path, content)}))
    _check(path, found)
    return found


def _source(path: Path, content: Mapping[str, Any]) -> str:
    """The source of a description, a file or folder beside it as a path."""
    beside = path.parent / content["source"]
    return str(beside) if beside.exists() else content["source"]


def _columns(path: Path, content: Any) -> dict[str, str]:
    """category → column, of {column: [category, …]}."""
    if not isinstance(content, dict) or not all(_is_list_of_texts(each) for each in content.values()):
        raise ValueError(f"{path}: columns maps names to lists of categories, received {content!r}")
    pairs = [(category, str(column)) for column, each in content.items() for category in each]
    if len(pairs) > len(found := dict(pairs)):
        raise ValueError(f"{path}: a category is in one of the columns, received {content!r}")
    return found


def _check(path: Path, found: Description) -> None:
    """ValueError for keys that contradict each other."""
    if found.score is not None and found.score not in SCORES:
        raise ValueError(f"{path}: score is one of {', '.join(SCORES)}, received {found.score!r}")
    if found.prompt is None:
        if given := [key for key in (*_LISTS, "reference", "id", "score") if getattr(found, key)]:
            raise ValueError(f"{path}: {given[0]} is of rows that a prompt is made from; add prompt: '… {{KEY}}'")
        return
    asked = set(found.placeholder.findall(found.prompt))
    if missing := sorted(asked - {*found.keys, *found.optional}):
        raise ValueError(f"{path}: each {{KEY}} of prompt is in keys or optional; {missing[0]!r} is not: add it")
    keys = (*found.keys, *found.optional)
    known = {key.casefold(): key for key in keys}
    for written_so, name, _ in _FORMATTED.findall(found.prompt):
        if (key := known.get(name.casefold())) is not None and written_so not in keys:
            raise ValueError(
                f"{path}: {{KEY}} of prompt is a key as it is in the rows, for its text as it is; received "
                f"{{{written_so}}}; write {{{key}}}, or other signs than braces for what is no key"
            )
    if not asked:
        raise ValueError(f"{path}: prompt has a {{KEY}} of the row, received {found.prompt!r}")
    for paragraph in found.prompt.split("\n\n"):
        named = dict.fromkeys(found.placeholder.findall(paragraph))
        optional, required = ([key for key in named if (key in found.optional) == side] for side in (True, False))
        if optional and required:
            raise ValueError(
                f"{path}: a paragraph of prompt is left out with its optional key, received {optional[0]!r} beside "
                f"{required[0]!r}; put an empty line between them"
            )
    if found.score in ("accuracy", "rouge2") and found.reference is None:
        raise ValueError(f"{path}: the score {found.score} needs reference, the key of the correct answer; add it")


def written(value: Any) -> str:
    """A row's value in a prompt; of a list an entry a line."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
