"""Loading heads: `config.json`, `model.safetensors` and `provenance.json` of a folder that `save_pretrained` wrote."""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_type_hints

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draft_heads.configs.options import option_names
from draft_heads.data.common.files import checksum, read_object, sha256
from draft_heads.data.common.pretrained import check_folder_or_hub_id
from draft_heads.data.fingerprint import check_fingerprint
from draft_heads.heads.base import DraftHead
from draft_heads.heads.config import (
    CONFIG,
    FORMAT_VERSION,
    OF_THE_TARGET,
    PROVENANCE,
    WEIGHTS,
    WEIGHTS_SHA256,
    HeadConfig,
    target_sizes,
)

ANEW = "copy the checkpoint again"
"""What helps where a file of a head is damaged."""


def without_deleted_options(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of version 1 without two that CTC heads had; ValueError if one was used."""
    deleted = {"blocks": 1, "open_windows": False} if values["kind"] == "ctc" else {}
    for name, default in deleted.items():
        if (value := values.get(name, default)) != default:
            raise ValueError(
                f"{name} of a CTC head must be {json.dumps(default)}, as the option was deleted; got "
                f"{json.dumps(value)}; train the head again, or decode with the version that trained it"
            )
    return {name: value for name, value in values.items() if name not in deleted}


MIGRATIONS: list[Callable[[dict[str, Any]], dict[str, Any]]] = [lambda values: values, without_deleted_options]
"""Item v makes the settings of version v those of version v + 1. Version 0 differs by the missing number only."""


logger = logging.getLogger(__name__)

_WEIGHTS_XXH3 = "checksum_of_weights"  # some older versions wrote it in place of WEIGHTS_SHA256
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

HEADS = {
    "chimera": "ChimeraHead",
    "ctc": "CTCHead",
    "eagle3": "Eagle3Head",
    "hydra": "HydraHead",
    "medusa": "MedusaHead",
}
"""Kind → its class in `heads/KIND.py`; `inference/drafters/heads/KIND.py` drafts with it. Imported on first use."""


@functools.cache
def head_classes(kind: str) -> tuple[type[DraftHead], type[HeadConfig]]:
    """The module and configuration classes of a kind; ValueError lists the known ones."""
    if kind not in HEADS:
        raise ValueError(f"unknown head kind {kind!r}; known kinds are {', '.join(sorted(HEADS))}")
    head = getattr(importlib.import_module(f"draft_heads.heads.{kind}"), HEADS[kind])
    return head, get_type_hints(head)["config"]


def head_variants(kinds: Iterable[str] = tuple(HEADS)) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → (kind, option values) of each kind with its defaults, and of the variants that its config declares.

    Worked example: hydra gives {"hydra": ("hydra", {}), "hydra_plus": ("hydra", {"layers": 4, …})}.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind in kinds:
        found[kind] = kind, {}
        for name, options in head_classes(kind)[1].variants.items():
            found[f"{kind}_{name}"] = kind, options
    return found


def recipe_settings(kind: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe, beside the training, says of the head itself."""
    return {name: recipe[name] for name in option_names(head_classes(kind)[1]) if name in recipe}


def new_head(kind: str, target_config: Any, **settings: Any) -> DraftHead:
    """A head with random weights for a target of this configuration: of its sizes, with the layers that such heads
    read where `settings`, the options of its kind, name none."""
    head_type, config_type = head_classes(kind)
    layers = config_type.usual_layers(target_config.num_hidden_layers)
    return head_type(config_type(**target_sizes(target_config), **{"target_layers": layers, **settings}))


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


@contextmanager
def malformed(what: str | Path) -> Iterator[None]:
    """Inside, whatever values break raises a ValueError that names the file or folder they are from."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{what} must have {error.args[0]!r}; it has none; copy it again") from error
    except (ValueError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{what} cannot be used: {error}") from error


def foreign_form(config: dict[str, Any]) -> str | None:
    """Which of the formats of scripts/export.py a config.json is in, if in any."""
    if config.get("speculators_model_type") == "eagle3":
        return "speculators"
    if "medusa_num_heads" in config:
        return "tgi-medusa"
    if config.get("model_type") == "medusa":
        return "vllm-medusa"
    return "eagle3" if any("Eagle3" in str(name) for name in config.get("architectures") or ()) else None


def read_config(source: str | Path) -> dict[str, Any]:
    """The settings in `config.json` of a head checkpoint, in their present form whatever version wrote the file.

    ValueError says what is missing or malformed, or that the file is from a newer version of this library.
    """
    path = locate(source) / CONFIG
    if not path.is_file():
        raise ValueError(f"a head checkpoint needs {CONFIG}; {path.parent} has none; give RUN/head of a finished run")
    config = read_object(path, ANEW)
    if not isinstance(config.get("kind"), str):
        if form := foreign_form(config):
            raise ValueError(
                f"{path.parent} has a head in another form, {form}; read it once with scripts/import_head.py --head "
                f"{path.parent} --target TARGET --output RUN/head, and give RUN/head"
            )
        raise ValueError(
            f"{path} must name the head's kind; got {config.get('kind')!r}; is this a draft head's folder?"
        )
    version = config.pop("format_version", 0)
    if not isinstance(version, int) or version not in range(FORMAT_VERSION + 1):
        raise ValueError(
            f"{path} must have a format_version of at most {FORMAT_VERSION}; it has {version!r}; update draft-heads"
        )
    if version == FORMAT_VERSION and (missing := sorted(OF_THE_TARGET - config.keys())):
        raise ValueError(f"{path} must have every size of the head; it has no {', '.join(missing)}; copy it again")
    with malformed(path):
        for migrate in MIGRATIONS[version:]:
            config = migrate(config)
    return config


def load_head(source: str | Path, target_fingerprint: dict[str, Any] | None = None) -> DraftHead:
    """Load a head (float32, CPU, evaluation mode) from a folder or hub id.

    With a target's fingerprint given, a head trained for another target is refused with every difference named; one
    for other weights of the same architecture and tokenizer is loaded, and a line says so.
    """
    folder = locate(source)
    values = read_config(folder)
    with malformed(folder / CONFIG):
        head_class, config_class = head_classes(values["kind"])
        config = config_class.from_dict(values)
        head = head_class(config)
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
    if problems := misfits(head, state):
        raise ValueError(f"{weights} does not fit its config.json: {'; '.join(problems)}; copy both again")
    if "draft_vocab" in state:
        with malformed(weights):
            head.set_draft_vocab(state["draft_vocab"])
    head.load_state_dict(state)
    head.provenance = _provenance(folder / PROVENANCE)
    for key, digest in ((WEIGHTS_SHA256, sha256), (_WEIGHTS_XXH3, checksum)):
        written = head.provenance.pop(key, None)  # the oldest versions wrote neither
        with suppress(ImportError):  # of xxhash, which vLLM's environment may lack
            if written is not None and written != (found := digest(weights)):
                raise ValueError(
                    f"{weights} has other content than {PROVENANCE} says ({key} {found}, not {written}): it is damaged "
                    f"or another head's; copy the folder again, or delete {key} there if you have changed it"
                )
    return head.float().eval()


def misfits(head: DraftHead, state: Mapping[str, Tensor]) -> list[str]:
    """What of tensors under the head's own names it cannot take: missing, of another shape, no finite numbers."""
    expected = head.state_dict()
    problems = [f"missing {name}" for name in sorted(set(expected) - set(state))]
    problems += [f"unexpected {name}" for name in sorted(set(state) - set(expected))]
    for name in sorted(set(state) & set(expected)):
        tensor, wanted = state[name], expected[name]
        if tensor.shape != wanted.shape:
            problems.append(f"{name} is {tuple(tensor.shape)}, config.json says {tuple(wanted.shape)}")
        elif wanted.is_floating_point() and tensor.dtype not in _FLOATS:
            problems.append(f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}, no floating-point weights")
        elif wanted.is_floating_point() and (bad := int((~tensor.isfinite()).sum())):
            problems.append(f"{name} has {bad:,} values that are infinite or not a number")
    return problems


def _provenance(path: Path) -> dict[str, Any]:
    """What a file says of where a head comes from; {} without one and, with a line in the log, of a damaged one."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, dict):
            return known
        found = f"it holds a {type(known).__name__}"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        found = str(error)
    logger.warning(
        "%s must be a JSON object; %s: so nothing is known of the head's training, adapter and licence; copy the file "
        "anew",
        path,
        found,
    )
    return {}
