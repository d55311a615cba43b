"""Folders and hub ids of models: what is neither is refused in a sentence."""

import json

import pytest

from draft_heads.data.common.pretrained import AutoConfig, load_config


@pytest.mark.parametrize("source", ["no/such/folder", "data/nothing", "./nothing", "/nothing", "a b", "data/bpe.py"])
def test_a_path_without_a_folder_is_refused_before_the_hub_is_asked(source, monkeypatch):
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    with pytest.raises(
        ValueError,
        match=f"^--target {source} (does not exist|is a file)(; give an existing folder, or a|, and is looked for)",
    ):
        load_config(source)


def test_a_hub_id_whose_owner_is_a_folder_here_is_told_so(monkeypatch):
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    with pytest.raises(
        ValueError, match="data/nothing does not exist, and is looked for in the folder data here, not on"
    ):
        load_config("data/nothing")


def test_what_the_hub_does_not_have_is_one_sentence(monkeypatch, tmp_path):
    def refuse(source):
        raise OSError("We couldn't connect.\nCheck your internet connection. See https://…")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(
        ValueError, match=r"there is no folder some/model, and no such model from the hub: We couldn't con"
    ):
        load_config("some/model")
    with pytest.raises(ValueError, match=r"is no model's folder: We couldn.t connect; give one with config.json"):
        load_config(str(tmp_path))


def test_a_value_that_transformers_cannot_use_is_refused_in_a_sentence(tmp_path):
    wrong: list = [("sliding_window", [4096, None]), ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4})]
    for model_type, (name, value) in zip(("mistral", "phi3"), wrong):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, name: value}))
        with pytest.raises(ValueError, match=rf"is no model's folder: .*{name}.*; give one with config.json"):
            load_config(str(tmp_path))
