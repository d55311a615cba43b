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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draft_heads.configs.yaml_files import read_yaml

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


def listed() -> list[Defect]:
    """All defects, from one list for each area of the project."""
    files = sorted(LISTS.glob("*.yaml"))
    return [Defect(**entry) for path in files for entry in read_yaml(path)]


@cache
def source(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def definitions() -> list[tuple[str, Path, int, int]]:
    """(qualified name, file, first line, last line) of what Python files define, and of C++ files as wholes."""
    found = []
    for file in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.*")):
        parts = file.relative_to(ROOT).parts
        if file.suffix == ".cpp":
            found.append((".".join(parts), file, 1, source(file).count("\n") + 1))
        elif file.suffix == ".py":
            for name, node in named(ast.parse(source(file)), ".".join(parts).removesuffix(".py")):
                first = min(part.lineno for part in [node, *getattr(node, "decorator_list", ())])
                found.append((name, file, first, node.end_lineno or first))
    return found


def named(scope: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Each function, class and assigned name of a module or class, at any depth, under its qualified name."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{prefix}.{node.name}", node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((f"{prefix}.{ast.unparse(target)}", node) for target in targets)
        if isinstance(node, ast.ClassDef):
            yield from named(node, f"{prefix}.{node.name}")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from named(node, prefix)


def pattern(fragment: str) -> re.Pattern[str]:
    """Finds code however its lines are wrapped."""
    pieces = re.findall(r"\w+|[^\w\s]", fragment)
    found = (rf"\b{piece}\b" if re.match(r"\w", piece) else re.escape(piece) for piece in pieces)
    return re.compile(r"\s*".join(rf"(?:,\s*)?{piece}" if piece in (r"\)", r"\]", r"\}") else piece for piece in found))


def edited(defect: Defect) -> tuple[Path, str]:
    """The file that a defect changes, and its text with the defect; ValueError if the entry does not fit the code."""
    places = [found for found in definitions() if f".{found[0]}".endswith(f".{defect.at}")]
    if not places:
        raise ValueError(
            f"{defect.name}: `at` names a definition, and there is no {defect.at}; "
            "write the name that the function, class or constant has now"
        )
    found = [
        (file, match)
        for _, file, first, last in places
        for match in pattern(defect.right).finditer(source(file))
        if first <= source(file).count("\n", 0, match.start()) + 1 <= last
    ]
    if len(found) != 1:
        at = ", ".join(f"{file.relative_to(ROOT)}:{first}" for _, file, first, _ in places)
        remedy = "lengthen it, or `at`" if found else "write the code as it stands there now, or correct `at`"
        raise ValueError(
            f"{defect.name}: `right` stands once in {defect.at}, "
            f"and {defect.right!r} stands {len(found)} times in {at}; {remedy}"
        )
    ((file, match),) = found
    before, after = source(file)[: match.start()], source(file)[match.end() :]
    line = source(file).splitlines()[before.count("\n")]
    indentation = line[: len(line) - len(line.lstrip())]
    return file, before + defect.wrong.replace("\n", "\n" + indentation) + after


def fault(defect: Defect) -> str | None:
    """Why an entry cannot be planted or tested, or None."""
    try:
        file, text = edited(defect)
        if file.suffix == ".py":
            ast.parse(text)
    except SyntaxError as error:
        return f"{defect.name}: `wrong` gives Python, and line {error.lineno} says {error.msg}; correct `wrong`"
    except ValueError as error:
        return str(error)
    paths, _, expression = defect.tests.partition(" -k ")
    files, names = zip(*(path.partition("::")[::2] for path in paths.split()))
    if missing := [path for path in files if not (ROOT / path).is_file()]:
        return (
            f"{defect.name}: `tests` names test files, and there is no {', '.join(missing)}; write where they are now"
        )
    known = "".join(source(ROOT / path) for path in files).lower()
    words = set(re.findall(r"\w+", " ".join([expression, *names]))) - {"and", "or", "not"}
    registered = "".join(map(source, {file for _, file, _, _ in definitions()}))  # names that tests have as parameters
    if unknown := [word for word in sorted(words) if word.lower() not in known and f'"{word}"' not in registered]:
        there = f"{files[0]} has no {', '.join(unknown)}"
        return f"{defect.name}: `tests` names tests, and {there}; write what they are called now"
    return None


def kills(defect: Defect) -> bool:
    """Whether a defect's tests fail in a copy of the project that has it; RuntimeError if they fail without it too, or
    only because `wrong` names what is not there."""
    file, text = edited(defect)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "draft_heads"  # a package without a file of its own: the project's folders are its parts
        left_out = shutil.ignore_patterns(".git", ".venv*", "build", "runs", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out)
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        every = ["-m", ""]  # the slow tests too
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", *every, *shlex.split(defect.tests)]

        def run(text: str, *options: str) -> tuple[int, str]:
            (copy / file.relative_to(ROOT)).write_text(text, encoding="utf-8")
            done = subprocess.run([*pytest, *options], cwd=copy, env=environment, capture_output=True, text=True)
            if done.returncode not in (0, 1):
                raise RuntimeError(
                    f"pytest could not run for {defect.name!r}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
                )
            return done.returncode, done.stdout

        status, told = run(text)
        if unknown := re.search(r"NameError: name '\w+'", told):
            raise RuntimeError(f"{defect.name}: `wrong` is a mistake that runs, and this is a {unknown[0]}; correct it")
        if status and run(source(file), "--last-failed")[0]:
            raise RuntimeError(f"{defect.name}: the test that caught it fails without it too; mend the test")
    return status == 1


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
