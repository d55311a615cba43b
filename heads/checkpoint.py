"""Saving and loading heads: `config.json`, `model.safetensors`, `provenance.json` and a model card in one folder."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draft_heads.data.files import write_text
from draft_heads.data.fingerprint import check_fingerprint
from draft_heads.data.pretrained import check_folder_or_hub_id
from draft_heads.heads.base import DraftHead
from draft_heads.heads.config import HeadConfig

WEIGHTS, CONFIG, PROVENANCE, CARD = "model.safetensors", "config.json", "provenance.json", "README.md"


HEADS = {
    "chimera": "draft_heads.heads.chimera:ChimeraHead:ChimeraConfig",
    "ctc": "draft_heads.heads.ctc:CTCHead:CTCConfig",
    "eagle3": "draft_heads.heads.eagle3:Eagle3Head:Eagle3Config",
    "hydra": "draft_heads.heads.hydra:HydraHead:HydraConfig",
    "medusa": "draft_heads.heads.medusa:MedusaHead:MedusaConfig",
}
"""Kind → module, head class and configuration class; imported on first use."""


def head_classes(kind: str) -> tuple[type[DraftHead], type[HeadConfig]]:
    """The module and configuration classes of a kind; ValueError lists the known ones."""
    if kind not in HEADS:
        raise ValueError(f"unknown head kind {kind!r}; known kinds are {', '.join(sorted(HEADS))}")
    module, head, config = HEADS[kind].split(":")
    found = importlib.import_module(module)
    return getattr(found, head), getattr(found, config)


def save_head(head: DraftHead, folder: str | Path, provenance: dict[str, Any] | None = None, card: str = "") -> None:
    """Write the checkpoint; each file appears complete or not at all, `config.json` last: with it, all are there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    partial = folder / f".{WEIGHTS}.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)
    write_text(folder / PROVENANCE, json.dumps(provenance or {}, indent=2, sort_keys=True) + "\n")
    if card:
        write_text(folder / CARD, card)
    write_text(folder / CONFIG, head.config.to_json_string())


def locate(source: str | Path) -> Path:
    """The local folder of a checkpoint; a name that is no folder is fetched as a hub id."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    check_folder_or_hub_id("head checkpoint", str(source))
    try:
        return Path(snapshot_download(str(source)))
    except Exception as error:
        raise ValueError(
            f"a head checkpoint must be a folder or a hub id that can be fetched; there is no folder {source} and "
            f"the hub says: {error}"
        ) from error


def read_config(source: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a head checkpoint; ValueError says what is missing or malformed."""
    path = locate(source) / CONFIG
    if not path.is_file():
        raise ValueError(f"a head checkpoint needs {CONFIG}; {path.parent} has none; give RUN/head of a finished run")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON; {error}; copy the checkpoint again") from error
    if not isinstance(config, dict) or "kind" not in config:
        raise ValueError(f"{path} must name the head's kind; it has none; is this a draft head's folder?")
    return config


def load_head(source: str | Path, target_fingerprint: dict[str, Any] | None = None) -> DraftHead:
    """Load a head (float32, CPU, evaluation mode) from a folder or hub id.

    With a target's fingerprint given, a head trained for another target is refused with every difference named; one
    for other weights of the same architecture and tokenizer is loaded, and a line says so.
    """
    folder = locate(source)
    values = read_config(folder)
    head_class, config_class = head_classes(values["kind"])
    config = config_class.from_dict(values)
    if target_fingerprint is not None:
        check_fingerprint(config.target_fingerprint, target_fingerprint, f"head {source}", fine_tune=True)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise ValueError(f"a head checkpoint needs {WEIGHTS}; {folder} has none; copy the checkpoint again")
    try:
        state = load_file(weights)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{weights} cannot be read ({error}): it was cut short or is no safetensors file; copy it again"
        ) from error
    head = head_class(config)
    expected = head.state_dict()
    problems = [f"missing {name}" for name in sorted(set(expected) - set(state))]
    problems += [f"unexpected {name}" for name in sorted(set(state) - set(expected))]
    problems += [
        f"{name} is {tuple(state[name].shape)}, config.json says {tuple(expected[name].shape)}"
        for name in sorted(set(state) & set(expected))
        if state[name].shape != expected[name].shape
    ]
    if problems:
        raise ValueError(f"{weights} does not fit its config.json: {'; '.join(problems)}; copy both again")
    if "draft_vocab" in state:
        try:
            head.set_draft_vocab(state["draft_vocab"])
        except ValueError as error:
            raise ValueError(f"{weights}: {error}") from error
    head.load_state_dict(state)
    return head.float().eval()


def push_head(folder: str | Path, repo_id: str, private: bool = True) -> str:
    """Upload a saved checkpoint to the hub; returns its address."""
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder)))
