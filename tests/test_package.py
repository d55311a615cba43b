"""The project as a package: which room may import which, and what a wheel holds and can do."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from draft_heads.data.synthetic.corpus import conversations

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("configs", "data", "heads", "inference", "train", "scripts")
MAY_IMPORT = {
    "configs": {"configs"},
    "data": {"configs", "data"},
    "heads": {"configs", "data", "heads"},
    "inference": {"configs", "data", "heads", "inference"},
    "train": {"configs", "data", "heads", "inference", "train"},
    "scripts": {"configs", "data", "heads", "inference", "train", "scripts"},
}
NOT_INSIDE = {
    "inference.target": ("inference.drafters", "inference.evaluation", "inference.engine", "inference.batch"),
    "inference.drafters": ("inference.evaluation", "inference.engine", "inference.batch"),
}
"""Part of `inference` → the parts it must not import."""


# ----------------------------------------------------------------------------------------------------
# Imports


def module_name(path: Path) -> str:
    """data/synthetic/__init__.py -> data.synthetic"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}


def imported(module: str) -> Iterator[str]:
    """Every absolute import of a module's file, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write draft_heads.…"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole.removeprefix("draft_heads.") in FILES else str(node.module)


def graph() -> dict[str, set[str]]:
    """Module → the project's modules that it imports."""
    return {
        module: {name.removeprefix("draft_heads.") for name in imported(module) if name.startswith("draft_heads.")}
        for module in FILES
    }


def inside(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def test_rooms_are_imported_by_their_package_name():
    strays = {
        (module, name) for module in FILES for name in imported(module) if name.partition(".")[0] in (*ROOMS, "tests")
    }
    assert not strays, f"import draft_heads.ROOM, and never tests: {sorted(strays)}"


def test_every_import_of_the_project_is_a_file_of_it():
    missing = {(module, name) for module, names in graph().items() for name in names - set(FILES)}
    assert not missing


def test_the_graph_of_modules_has_no_cycle():
    try:
        order = list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))
    assert len(order) == len(FILES)


def test_rooms_import_one_way():
    wrong = {
        (module, name)
        for module, names in graph().items()
        for name in names
        if name.partition(".")[0] not in MAY_IMPORT[module.partition(".")[0]]
    }
    assert not wrong


@pytest.mark.parametrize("part", NOT_INSIDE)
def test_parts_of_inference_import_one_way(part: str):
    wrong = {
        (module, name)
        for module, names in graph().items()
        if inside(module, part)
        for name in names
        if any(inside(name, other) for other in NOT_INSIDE[part])
    }
    assert not wrong


def test_modules_of_a_package_never_import_the_package():
    """`inference/__init__.py` imports the engine: a module inside that imported it back would find it half made."""
    wrong = {
        (module, name)
        for module, names in graph().items()
        for name in names
        if module != name and inside(module, name) and FILES[name].name == "__init__.py"
    }
    assert not wrong


ENTRY_POINTS = [name for name, path in FILES.items() if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]


def imported_when_loaded(module: str, seen: set[str]) -> Iterator[str]:
    """What loading a module imports, in order and through the project's own modules."""
    for node in ast.parse(FILES[module].read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("draft_heads.") in FILES else str(node.module) for name in whole]
        for name in names:
            own = name.removeprefix("draft_heads.")
            yield own
            if own != name and own in FILES and own not in seen:
                seen.add(own)
                yield from imported_when_loaded(own, seen)


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_entry_points_set_openmps_wait_policy_before_they_load_torch(module: str):
    loaded = list(imported_when_loaded(module, set()))
    heavy = [name.partition(".")[0] in ("torch", "transformers", "datasets") for name in loaded]
    assert True not in heavy or loaded.index("configs.command_line") < heavy.index(True)


# ----------------------------------------------------------------------------------------------------
# The wheel

PACKAGED = (
    "configs/**/*.yaml",
    "configs/**/*.jinja",
    "configs/**/*.json",
    "inference/native/*.cpp",
    "inference/evaluation/html/*.css",
    "inference/evaluation/html/*.js",
    "data/synthetic/*.yaml",
    "data/tiny_target/*",
)
"""What a wheel needs beside Python files."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the sources: what earlier builds left in build/ stays out."""
    source, output = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__"))
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(output), str(source))
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run_pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_installed(installed: Path, folder: Path, *arguments: str) -> str:
    """Run Python in `folder` with the installed wheel first on its path; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_wheel_installs_one_package_with_its_data(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"draft_heads"}
    expected = {path.relative_to(ROOT) for pattern in PACKAGED for path in ROOT.glob(pattern) if path.is_file()}
    expected |= {path.relative_to(ROOT) for path in FILES.values()}
    assert {f"draft_heads/{path}" for path in expected} <= names


@pytest.mark.slow
def test_an_installed_wheel_decodes_distils_and_trains_from_another_folder(installed: Path, tmp_path: Path):
    tiny = installed / "draft_heads" / "data" / "tiny_target"
    code = f"""
import sys
from draft_heads.inference import DecodingEngine, DrafterSpec, Target, build_drafter
loaded = [module.__file__ for name, module in sys.modules.items() if name.startswith("draft_heads.")]
assert len(loaded) > 20 and all(file.startswith({str(installed)!r}) for file in loaded), loaded
target = Target.from_pretrained({str(tiny)!r})
engine = DecodingEngine(target, build_drafter(DrafterSpec.parse("prompt_lookup"), target))
print(len(engine.generate([1, 2, 3]).tokens))
"""
    assert int(run_installed(installed, tmp_path, "-c", code)) > 0

    rows = "".join(json.dumps(row) + "\n" for row in conversations(8, 5, "heldout"))
    (tmp_path / "conversations.jsonl").write_text(rows, encoding="utf-8")
    distil = f"-m draft_heads.scripts.distill --target {tiny} --dataset conversations.jsonl --output distilled"
    run_installed(installed, tmp_path, *distil.split(), "--labels", "argmax")
    train = f"-m draft_heads.train.ctc --target {tiny} --dataset distilled --output_dir run --held_out 2"
    train += " --max_steps 2 --per_device_train_batch_size 2 --simulate_rows 1 --threads 1"
    assert "run/head" in run_installed(installed, tmp_path, *train.split())
    assert (tmp_path / "run" / "head" / "model.safetensors").is_file()
