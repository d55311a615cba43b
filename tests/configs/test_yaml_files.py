"""YAML files have each key of a mapping once."""

import pytest
import yaml

from draft_heads.configs.yaml_files import read_yaml


@pytest.mark.parametrize("text", ["a: 1\na: 2", "x: {b: [1], a: 1, 'a': 2}", "- {a: 1, a: 1}"])
def test_a_key_that_comes_twice_is_refused(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(yaml.YAMLError, match="a mapping has the key 'a' twice; keep one of them"):
        read_yaml(tmp_path / "x.yaml")


def test_merged_keys_may_be_overridden_also_when_they_are_merged_again(tmp_path):
    (tmp_path / "x.yaml").write_text("a: &a {k: 1, l: 2}\nb: &b {<<: *a, k: 3}\nc: {<<: *b, l: 4}\n1: x\n'1': y")
    found = read_yaml(tmp_path / "x.yaml")
    assert found == {"a": {"k": 1, "l": 2}, "b": {"k": 3, "l": 2}, "c": {"k": 3, "l": 4}, 1: "x", "1": "y"}
