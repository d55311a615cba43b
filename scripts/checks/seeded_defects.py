"""Mutation testing: insert known defects, one at a time, and check that the tests catch them.

    python scripts/checks/seeded_defects.py [--jobs 2] [--only NAME …]

Each defect is one edit of one file in a copy of the project, and names the tests that must fail. Prints killed/total;
the exit status is 0 only when every defect is caught.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).resolve().parent / "defects"
ROOMS = ("configs", "data", "heads", "inference", "scripts", "train")  # imported as draft_heads.ROOM


@dataclass(frozen=True)
class Defect:
    """One edit: `right` stands once in `file` and becomes `wrong`; `tests` (pytest arguments) must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


def listed() -> list[Defect]:
    """All defects, from one list for each part of the project."""
    files = sorted(LISTS.glob("*.yaml"))
    return [Defect(**entry) for path in files for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


def kills(defect: Defect) -> bool:
    """Whether the defect's tests fail in a copy of the project that has it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        left_out = shutil.ignore_patterns(".git", ".venv*", "build", "runs", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out)
        package = Path(folder) / "path" / "draft_heads"
        package.mkdir(parents=True)
        for room in ROOMS:
            (package / room).symlink_to(copy / room)
        path = copy / defect.file
        path.write_text(path.read_text(encoding="utf-8").replace(defect.right, defect.wrong), encoding="utf-8")
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
    args = parser.parse_args()
    defects = listed()
    unknown = sorted(set(args.only or ()) - {defect.name for defect in defects})
    if unknown:
        sys.exit(f"--only takes names of defects; there is no {', '.join(unknown)}")
    chosen = [defect for defect in defects if args.only is None or defect.name in args.only]
    killed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for defect, caught in zip(chosen, pool.map(kills, chosen)):
            killed += caught
            print(f"{'caught' if caught else 'MISSED'}  {defect.file}: {defect.name}", flush=True)
    print(f"{killed}/{len(chosen)} killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
