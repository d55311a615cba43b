"""YAML files in which every mapping has each key once: PyYAML itself keeps the last value and drops the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # before `<<: *other` is merged, which may be overridden
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        repeated = next((value for tag, value in keys if keys.count((tag, value)) > 1), None)
        if repeated is not None:
            raise yaml.MarkedYAMLError(
                problem=f"a mapping has the key {repeated!r} twice; keep one of them", problem_mark=node.start_mark
            )
        return node

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)  # what is merged first, then the mapping's own, of which the last counts
        named = {(key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key: (key, v) for key, v in node.value}
        node.value = list(named.values())  # PyYAML 6.0.4 would take the first, where the mapping is merged again


class _Texts(_UniqueKeys):
    pass


_Texts.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path, as_text: bool = False) -> Any:
    """The value of a YAML file; yaml.YAMLError for a mapping with a key twice as for other malformed YAML, OSError and
    UnicodeDecodeError as reading a text raises them.

    as_text: every scalar but null is the text that is written, so that `010` is not 8 and `on` is not true
    """
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Texts if as_text else _UniqueKeys)
