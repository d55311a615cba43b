"""What all command lines share: `--config FILE.yaml` with defaults for the flags, and errors as one line on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml


def read_config(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Defaults from a YAML mapping; unknown keys are an error that lists the valid ones."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read ({error.strerror}); give a YAML file") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must map flags to values, got {type(content).__name__}")
    flags = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    if unknown := sorted(str(key) for key in content if key not in flags):
        raise ValueError(f"--config {path}: unknown {', '.join(unknown)}; valid keys: {', '.join(flags)}")
    return {key: _config_value(path, flags[key], value) for key, value in content.items()}


def _config_value(path: Path, flag: argparse.Action, value: Any) -> Any:
    """`value` converted and checked as the flag on the command line would be."""
    if value is None:
        return None
    if flag.nargs == "+":
        convert: Any = flag.type or str
        return [convert(item) for item in (value if isinstance(value, list) else [value])]
    if flag.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"--config {path}: {flag.dest} must be true or false, got {value!r}")
        return value
    kind: Callable[[str], Any] = flag.type if callable(flag.type) else str
    try:
        return kind(str(value))
    except ValueError:
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"--config {path}: {flag.dest} must be of type {name}, got {value!r}") from None


def parse_with_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, required: Sequence[str]
) -> argparse.Namespace:
    """Parse flags over the defaults of --config; ValueError for a required flag that is in neither."""
    first, _ = parser.parse_known_args(arguments)
    if first.config is not None:
        parser.set_defaults(**read_config(first.config, parser))
    options = parser.parse_args(arguments)
    for name in required:
        if getattr(options, name) in (None, []):
            raise ValueError(f"--{name} is required; give it on the command line or in --config")
    return options


def exit_status(run: Callable[[], bool | None]) -> int:
    """Run a script's work: 0, 1 when it returns False, 2 when it cannot run, with the reason on stderr."""
    try:
        return int(run() is False)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
