"""The formats by name; writing a folder, reading one, and comparing what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draft_heads.data.common.files import read_object, write_tensors, write_text
from draft_heads.heads.base import DraftHead, Rows, TargetView
from draft_heads.heads.checkpoint import ANEW, foreign_form, malformed
from draft_heads.heads.config import CONFIG
from draft_heads.heads.export import eagle3, speculators, tgi_medusa, vllm_medusa

CONVERTER = "https://huggingface.co/spaces/safetensors/convert"


@dataclass(frozen=True)
class Format:
    """One format.

    kind     of the heads it can hold
    engines  which read it
    stated   the settings that its config.json states
    weights  the name of its file of tensors
    write    (head, the target's transformers config, its name) → config.json and tensors
    read     the reverse: (config.json, tensors) → head
    """

    kind: str
    engines: str
    stated: tuple[str, ...]
    weights: str
    write: Callable[[Any, Any, str], tuple[dict[str, Any], dict[str, Tensor]]]
    read: Callable[[dict[str, Any], dict[str, Tensor]], DraftHead]


_MEDUSA = ("heads", "layers", "hidden_size", "vocab_size", "classes")
_TGI = "TGI (archived)"
_EAGLE = (
    *("target_layers", "hidden_size", "intermediate_size", "vocab_size", "classes", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
)
FORMATS = {
    name: Format(kind, engines, stated, weights, module.write, module.read)
    for name, kind, engines, stated, weights, module in (
        ("vllm-medusa", "medusa", "vLLM up to 0.32", _MEDUSA, "model.safetensors", vllm_medusa),
        ("tgi-medusa", "medusa", _TGI, _MEDUSA, "medusa_lm_head.safetensors", tgi_medusa),
        ("eagle3", "eagle3", "vLLM, SGLang, llama.cpp's converter", _EAGLE, "model.safetensors", eagle3),
        ("speculators", "eagle3", "vLLM", _EAGLE, "model.safetensors", speculators),
    )
}
_CHECKS: dict[str, Callable[[Any], object]] = {"medusa": vllm_medusa.check, "eagle3": eagle3.layer_ids}
"""Of a kind's head, ValueError for what no engine can do."""


def formats_of(kind: str) -> dict[str, Format]:
    """The formats that hold heads of a kind, by name."""
    return {name: found for name, found in FORMATS.items() if found.kind == kind}


def check_exportable(head: DraftHead, name: str) -> None:
    """ValueError for a head that the format cannot hold, with what to do instead."""
    kind, wanted = head.config.kind, FORMATS[name].kind
    if kind == wanted:
        _CHECKS[kind](head)
        return
    instead = (
        "this project's engine: scripts/serve.py, scripts/evaluate.py, `draft_heads.inference.engine`, or "
        "`model.generate(custom_generate=…)` of transformers; no other engine knows its kind"
    )
    if fitting := formats_of(kind):
        instead = f"--format {' or '.join(fitting)}"
    raise ValueError(f"--format {name} holds {wanted} heads; got a {kind} head; use {instead}")


def write_folder(head: DraftHead, name: str, folder: Path, target: Any, target_name: str) -> None:
    """Write the head to a folder; `config.json` last, so that with it all is there."""
    check_exportable(head, name)
    config, tensors = FORMATS[name].write(head, target, target_name)
    folder.mkdir(parents=True, exist_ok=True)
    own = {key: tensor.clone() for key, tensor in tensors.items()}  # one file holds no tensor twice
    write_tensors(folder / FORMATS[name].weights, own)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def read_folder(folder: Path, name: str = "", target_layers: Sequence[int] = ()) -> DraftHead:
    """The head of a folder in one of the formats; name: which, "" finds out. ValueError says what is missing.

    target_layers: of an EAGLE-3 head, in place of those that its folder names.
    """
    config, name = read_settings(folder, name)
    return assembled(folder, name, config, read_tensors(folder, FORMATS[name].weights), target_layers)


def read_settings(folder: Path, name: str = "") -> tuple[dict[str, Any], str]:
    """What the config.json of an exported head says, and the format that it is in where `name` is ""."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"an exported head has a {CONFIG}; {folder} has none; give the folder that holds it")
    config = read_object(path, ANEW)
    return config, name or format_of(config, folder)


def assembled(
    folder: Path, name: str, config: dict[str, Any], tensors: dict[str, Tensor], target_layers: Sequence[int] = ()
) -> DraftHead:
    """The head of what was read from a folder, as `read_folder` makes it."""
    if target_layers and FORMATS[name].kind != "eagle3":
        raise ValueError(f"--target_layers is for EAGLE-3 heads only; {folder} is {name}; leave it out")
    if target_layers:
        ids, inside = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config")
        inside = {**inside, ids: None} if isinstance(inside, dict) else None
        config = config | {ids: list(target_layers), "eagle_config": inside}
    with malformed(f"{folder} as {name}"):
        return FORMATS[name].read(config, tensors)


def stated_target(config: dict[str, Any]) -> str:
    """The target that a folder's config.json names; "" where it names none."""
    found: Any = config
    for name in ("speculators_config", "verifier", "name_or_path"):
        found = found.get(name) if isinstance(found, dict) else None
    return str(config.get("base_model_name_or_path") or found or "")


def format_of(config: dict[str, Any], folder: Path) -> str:
    """Which format a config.json is in."""
    if form := foreign_form(config):
        return form
    if "kind" in config and "format_version" in config:
        raise ValueError(f"a head in another form is imported; {folder} is one of this project's: use it as it is")
    raise ValueError(
        f"{folder / CONFIG} names none of the formats {', '.join(FORMATS)}; give a head of one of them, or pass "
        "--format where it is in one"
    )


def read_tensors(folder: Path, expected: str) -> dict[str, Tensor]:
    """The tensors of a folder: those of the expected file, or of its only safetensors file."""
    found = [folder / expected] if (folder / expected).is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        if not found and (pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])):
            raise ValueError(
                f"a head is read from safetensors, as a pickle can run code; got {pickled[0]}; convert it once to "
                f"{folder / expected}, for example at {CONVERTER}"
            )
        names = ", ".join(path.name for path in found) or "no such file"
        raise ValueError(f"an exported head has its tensors in {expected}; {folder} has {names}; copy it again")
    try:
        return load_file(found[0])
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{found[0]} cannot be read: it was cut short or holds no tensors; copy it again") from error


@torch.no_grad()
def drafts(head: DraftHead) -> Tensor:
    """[N, offsets, D], the log-probabilities of a head's drafts from fixed random states."""
    config, random = head.config, torch.Generator().manual_seed(0)
    length, known = 64, 16  # one length for all heads: after the last anchor, each offset has a token to read
    embedding = torch.nn.Embedding(known, config.hidden_size)
    embedding.weight.data.normal_(generator=random)
    ids = torch.randint(known, (1, length), generator=random)
    states = torch.randn(1, length, config.hidden_size * (1 + len(config.target_layers)), generator=random)
    hidden, aux_hidden = states.split([config.hidden_size, states.shape[-1] - config.hidden_size], dim=-1)
    rows = Rows.of(hidden, ids, aux_hidden=aux_hidden if config.target_layers else None)
    lent = TargetView(embedding, torch.empty(0, config.hidden_size))
    return head.offset_log_probs(rows, torch.arange(4)[None], lent)


def differences(head: DraftHead, back: DraftHead, name: str) -> list[str]:
    """Tensors and settings in which a head that was read back from a format is not the one that was written.

    "log-probabilities": its drafts from random states differ, at the offsets that both heads have.
    """
    ours, theirs = head.state_dict(), back.state_dict()
    found = sorted(ours.keys() ^ theirs.keys())
    found += [
        key
        for key in sorted(ours.keys() & theirs.keys())
        if ours[key].shape != theirs[key].shape or not torch.equal(ours[key], theirs[key].to(ours[key]))
    ]
    found += [key for key in FORMATS[name].stated if getattr(head.config, key) != getattr(back.config, key)]
    here, there = drafts(head), drafts(back)
    offsets = min(here.shape[1], there.shape[1])
    same = len(here[0, 0]) == len(there[0, 0]) and torch.allclose(here[:, :offsets], there[:, :offsets], atol=1e-5)
    return found if same else [*found, "log-probabilities"]
