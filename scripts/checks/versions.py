"""Do the oldest and the newest libraries that pyproject.toml admits work? Own environments, fast tests, a quickstart.

    python scripts/checks/versions.py [--only newest] [--tests tests/train …]

`.venv-versions/oldest` gets the lower bound of every range and what pip chooses beside them, `newest` what pip takes of
the ranges alone; `--tests` names other tests than all fast ones. Prints a table of what was tried, for CONTRIBUTING.md;
exit status 1 if anything failed. An hour and a half on two cores, and 13 GB where pip takes torch's CUDA builds.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from draft_heads.configs.command_line import exit_status

from packaging.requirements import Requirement

from draft_heads.scripts.decoding_options import script_parser

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-versions"
SHOWN = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "deepspeed", "tokenizers", "huggingface-hub"),
    "safetensors",
)
"""The libraries whose versions the table has."""
ENDS = ("oldest", "newest")
QUICKSTART = "--heads ctc --conversations 200 --steps 20 --questions 2 --problems 2"


def requirements() -> dict[str, Requirement]:
    """Name → requirement, of what a user installs: the dependencies in pyproject.toml, the server's and ROUGE's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["serve"], *extras["rouge"]]
    return {found.name: found for found in map(Requirement, wanted)}


def lower_bounds(ranges: dict[str, Requirement]) -> dict[str, str]:
    """{"torch": "2.11", …}: what `oldest` installs; ValueError for a range without a lower bound."""
    pinned = {}
    for name, wanted in ranges.items():
        bounds = [one.version for one in wanted.specifier if one.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"pyproject.toml must give {name} one lower bound, as {name}>=1.0; got {wanted}; add it")
        pinned[name] = bounds[0]
    return pinned


def step(title: str, command: Sequence[str], log: Path, **environment: str) -> bool:
    """Run a command of an environment, its output in `log`; whether it succeeded."""
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as written:
        written.write(f"$ {shlex.join(command)}\n")
        written.flush()
        done = subprocess.run(
            command, cwd=ROOT, stdout=written, stderr=subprocess.STDOUT, check=False, env={**os.environ, **environment}
        )
    outcome = "passed" if done.returncode == 0 else f"failed (status {done.returncode}), see {log}"
    print(f"{title}: {outcome}, {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return done.returncode == 0


def make_environment(end: str, folder: Path) -> bool:
    """An environment of one end of the ranges, kept from an earlier check: pip changes what is not as asked for."""
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    pinned = [f"{name}=={version}" for name, version in lower_bounds(requirements()).items()] if end == "oldest" else []
    newest = ["--upgrade", "--upgrade-strategy", "eager"] if end == "newest" else []
    pip = [python, "-m", "pip", "install", "--quiet"]
    return step(f"{end}: pip", [*pip, "--upgrade", "pip", "setuptools", "wheel"], folder / "pip.log") and step(
        f"{end}: install", [*pip, *newest, "-e", ".[dev]", *pinned], folder / "install.log"
    )


def installed(folder: Path) -> dict[str, str]:
    """Library → the version that an environment has."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {SHOWN!r}}}))"
    done = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def outcome(log: Path) -> str:
    """What pytest says last, without its decoration; a library may write after it."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    said = [line.strip("= ") for line in lines if line.strip()]
    return next((line for line in reversed(said) if " passed" in line or " failed" in line), (said or ["not run"])[-1])


def check(end: str, tests: Sequence[str], jobs: int) -> tuple[bool, dict[str, str], str]:
    """Whether one end of the ranges works, its versions, and how it went in a few words."""
    folder = FOLDER / end
    if not make_environment(end, folder):
        return False, {}, "cannot be installed together"
    python, log = str(folder / "bin" / "python"), folder / "tests.log"
    versions = installed(folder)
    parallel = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", *parallel, *tests]
    own = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}  # DeepSpeed's, compiled for one torch
    tested = step(f"{end}: tests", pytest, log, OMP_NUM_THREADS="1", **own)
    quickstart = [python, "scripts/quickstart.py", "--output", str(folder / "quickstart"), *QUICKSTART.split()]
    ran = step(f"{end}: quickstart", quickstart, folder / "quickstart.log", **own)
    return tested and ran, versions, f"{outcome(log)}; quickstart {'passed' if ran else 'failed'}"


def table(rows: Sequence[tuple[str, bool, dict[str, str], str]], day: date) -> str:
    """Markdown: a column for each end, a row for each library."""
    lines = [
        f"| {day.isoformat()} | {' | '.join(end for end, *_ in rows)} |",
        "| --- |" + " --- |" * len(rows),
        *(f"| {name} | {' | '.join(found.get(name, '—') for _, _, found, _ in rows)} |" for name in SHOWN),
        f"| result | {' | '.join(('good: ' if good else 'FAILED: ') + told for _, good, _, told in rows)} |",
    ]
    return "\n".join(lines)


def main() -> bool:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--only", choices=ENDS, help="one end of the ranges (default: both, one after the other)")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="tests to run (default: all fast ones)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (default 2)")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    rows = [(end, *check(end, args.tests, args.jobs)) for end in ([args.only] if args.only else ENDS)]
    print(f"\n{table(rows, date.today())}")
    return all(good for _, good, _, _ in rows)


if __name__ == "__main__":
    sys.exit(exit_status(main))
