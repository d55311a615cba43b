"""The texts of the generated corpus, read from the YAML files of this folder."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_heads.configs.yaml_files import read_yaml


@functools.cache
def read_texts(name: str) -> Any:
    """What `name`.yaml holds; its first lines say what the entries mean. Not to be changed by the caller."""
    return read_yaml(Path(__file__).with_name(f"{name}.yaml"))


@dataclass(frozen=True)
class Topic:
    """One thing people ask about, with the phrases that answers are built from."""

    name: str
    tools: list[str]
    steps: list[str]
    gains: list[str]
    slips: list[str]
    sign: str


@dataclass(frozen=True)
class Scenario:
    """The story of a word problem with one arithmetic operation, `+`, `-` or `*`, for each step."""

    operations: str
    questions: list[str]
    steps: list[str]
    final: str


@functools.cache
def topics() -> tuple[Topic, ...]:
    """The topics of topics.yaml."""
    return tuple(Topic(**entry) for entry in read_texts("topics"))


@functools.cache
def scenarios() -> tuple[Scenario, ...]:
    """The scenarios of problems.yaml."""
    return tuple(Scenario(**entry) for entry in read_texts("problems")["scenarios"])
