"""Mutation testing: insert known defects, one at a time, and check that the tests catch them.

    python scripts/checks/seeded_defects.py [--jobs 2] [--only NAME …]
    python scripts/checks/seeded_defects.py --check      # in seconds: only whether each defect can still be inserted

An entry of `scripts/checks/defects/*.yaml` replaces code and names the tests that must then fail:

    - name: compaction off by one
      at: KVCache.commit
      right: '[:, None] + rows'
      wrong: '[:, None] + rows - 1'
      tests: tests/inference/test_engine.py

`at` is a function, method, class or assigned name in any file, with as much of its qualified name as tells it from
others (`sampling.uniform`), or a C++ file (`skinny_matmul.cpp`). `right` stands there once; take as little code as says
what is wrong. Blanks, line breaks and a comma before a closing bracket do not count. Further lines of `wrong` are
indented like its first.

Prints killed/total; the exit status is 0 only when every defect is caught.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).resolve().parent / "defects"
ROOMS = ("configs", "data", "heads", "inference", "scripts", "train")  # imported as draft_heads.ROOM


@dataclass(frozen=True)
class Defect:
    """One edit: in the definition `at` the code `right` becomes `wrong`; `tests` (pytest arguments) must then fail."""

    name: str
    at: str
    right: str
    wrong: str
    tests: str


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: its qualified name, its file and its first and last character there."""

    name: str
    file: Path
    start: int
    end: int


def listed() -> list[Defect]:
    """All defects, from one list for each area of the project."""
    files = sorted(LISTS.glob("*.yaml"))
    return [Defect(**entry) for path in files for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


@cache
def source(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def definitions() -> list[Definition]:
    """Functions, classes and assigned names of all Python files, and all C++ files as wholes."""
    found = []
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.cpp")):
            name = ".".join(file.relative_to(ROOT).parts)
            found.append(Definition(name, file, 0, len(source(file))))
        for file in sorted((ROOT / room).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            line_starts = [0]
            for line in source(file).splitlines(keepends=True):
                line_starts.append(line_starts[-1] + len(line))
            for name, first, last in _named(ast.parse(source(file))):
                found.append(Definition(f"{module}.{name}", file, line_starts[first - 1], line_starts[last]))
    return found


def _named(scope: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Each name that is defined in a module or class, at any depth: qualified name, first line, last line."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(scope, ast.FunctionDef):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names, first = [target.id for target in targets if isinstance(target, ast.Name)], node.lineno
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _named(node)
            continue
        else:
            continue
        for name in names:
            yield name, first, node.end_lineno or first
            if isinstance(node, ast.ClassDef):
                yield from ((f"{name}.{inner}", start, end) for inner, start, end in _named(node))


def pattern(fragment: str) -> re.Pattern[str]:
    """Finds code however its lines are wrapped."""
    pieces = re.findall(r"\w+|[^\w\s]", fragment)
    found = re.escape(pieces[0])
    for before, piece in pairwise(pieces):
        words = re.match(r"\w", before) and re.match(r"\w", piece)
        closing = r"(?:,\s*)?" if piece in (")", "]", "}") else ""
        found += (r"\s+" if words else r"\s*") + closing + re.escape(piece)
    ends = r"(?<!\w)" if re.match(r"\w", pieces[0]) else "", r"(?!\w)" if re.match(r"\w", pieces[-1]) else ""
    return re.compile(found.join(ends))


def edited(defect: Defect) -> tuple[Path, str]:
    """The file that a defect changes, and its text with the defect; ValueError if the entry does not fit the code."""
    places = [d for d in definitions() if f".{d.name}".endswith(f".{defect.at}")]
    if not places:
        raise ValueError(
            f"{defect.name}: `at` names a definition, and there is no {defect.at}; "
            "write the name that the function, class or constant has now"
        )
    finder = pattern(defect.right)
    found = [(d, match) for d in places for match in finder.finditer(source(d.file), d.start, d.end)]
    if len(found) != 1:
        at = ", ".join(f"{d.file.relative_to(ROOT)}:{source(d.file).count(chr(10), 0, d.start) + 1}" for d in places)
        remedy = "lengthen it, or `at`" if found else "write the code as it stands there now, or correct `at`"
        raise ValueError(
            f"{defect.name}: `right` stands once in {defect.at}, "
            f"and {defect.right!r} stands {len(found)} times in {at}; {remedy}"
        )
    (definition, match), text = found[0], source(found[0][0].file)
    line = text[text.rfind("\n", 0, match.start()) + 1 :]
    indentation = line[: len(line) - len(line.lstrip(" "))]
    wrong = defect.wrong.replace("\n", "\n" + indentation)
    return definition.file, text[: match.start()] + wrong + text[match.end() :]


def fault(defect: Defect) -> str | None:
    """Why an entry cannot be planted or tested, or None."""
    try:
        file, text = edited(defect)
        if file.suffix == ".py":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "assertion is always true" and the like
                ast.parse(text)
    except SyntaxError as error:
        return f"{defect.name}: `wrong` gives Python, and line {error.lineno} says {error.msg}; correct `wrong`"
    except ValueError as error:
        return str(error)
    return _fault_of_tests(defect)


def _fault_of_tests(defect: Defect) -> str | None:
    arguments = shlex.split(defect.tests)
    expression = arguments.pop(arguments.index("-k") + 1) if "-k" in arguments else ""
    files, names = zip(*(part.partition("::")[::2] for part in arguments if part != "-k"))
    missing = [file for file in files if not (ROOT / file).is_file()]
    if missing:
        return (
            f"{defect.name}: `tests` names test files, and there is no {', '.join(missing)}; write where they are now"
        )
    text = "".join(source(ROOT / file) for file in files)
    known = " ".join(re.findall(r"def test_\w+|\"[^\"\n]*\"", text)).lower()  # names of tests and their parameters
    words = set(re.findall(r"\w+", " ".join([expression, *names]))) - {"and", "or", "not"}
    unknown = [word for word in sorted(words) if word.lower() not in known and not _quoted(word)]
    if unknown:
        there = f"{files[0]} has no {', '.join(unknown)}"
        return f"{defect.name}: `tests` names tests, and {there}; write what they are called now"
    return None


def _quoted(word: str) -> bool:
    """Whether the word is a name that code registers, which tests have for a parameter."""
    return any(f'"{word}"' in source(file) for file in {definition.file for definition in definitions()})


def kills(defect: Defect) -> bool:
    """Whether the defect's tests fail in a copy of the project that has it."""
    file, text = edited(defect)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        left_out = shutil.ignore_patterns(".git", ".venv*", "build", "runs", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out)
        package = Path(folder) / "path" / "draft_heads"
        package.mkdir(parents=True)
        for room in ROOMS:
            (package / room).symlink_to(copy / room)
        (copy / file.relative_to(ROOT)).write_text(text, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", ""]  # the slow tests too
        done = subprocess.run(
            [*pytest, *shlex.split(defect.tests)], cwd=copy, env=environment, capture_output=True, text=True
        )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run for {defect.name!r}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="defects tested at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these defects only")
    parser.add_argument("--check", action="store_true", help="run no tests: list the entries that do not fit the code")
    args = parser.parse_args()
    defects = listed()
    unknown = sorted(set(args.only or ()) - {defect.name for defect in defects})
    if unknown:
        sys.exit(f"--only takes names of defects; there is no {', '.join(unknown)}")
    chosen = [defect for defect in defects if args.only is None or defect.name in args.only]
    faults = [found for defect in chosen if (found := fault(defect))]
    if args.check or faults:
        print("\n".join([*faults, f"{len(chosen) - len(faults)}/{len(chosen)} entries fit the code"]))
        return 1 if faults else 0
    killed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for defect, caught in zip(chosen, pool.map(kills, chosen)):
            killed += caught
            print(
                f"{'caught' if caught else 'MISSED'}  {edited(defect)[0].relative_to(ROOT)}: {defect.name}", flush=True
            )
    print(f"{killed}/{len(chosen)} killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
