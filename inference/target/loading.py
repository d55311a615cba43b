"""Load a causal language model as a target: its type, its place, its adapter."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from draft_heads.configs.options import out_of_memory
from draft_heads.data.common.pretrained import MAY_BE_MISSING, check_folder_or_hub_id, load_config, model_class
from draft_heads.data.fingerprint import adapter_scaling, weights_hashes
from draft_heads.data.generation_config import check_file
from draft_heads.data.text.chat_template import load_tokenizer, split_settings, template_source, with_settings
from draft_heads.inference.target import sharded
from draft_heads.inference.target.architecture import check_decoder_only
from draft_heads.inference.target.library_names import caps_scores

logger = logging.getLogger(__name__)

LESS_MEMORY = (
    "name a smaller type (--dtype), several GPUs (--device auto) or a smaller target; in training those are "
    "--target_dtype and --target_device auto, or --shard_target splits it among the processes"
)


def load_model(
    path: str,
    config: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    adapter: str | None = None,
    spread: bool = False,
    split: bool = False,
    mapped: bool = False,
) -> tuple[Any, dict[str, str] | None]:
    """The model, and with an adapter the hashes of its weights; ValueError for what cannot be loaded.

    dtype   None: float32 on a CPU, the checkpoint's own elsewhere
    device  where it goes, unless it is `spread` over all devices, `split` among processes, or `mapped`
    mapped  weights stay in their files, of which memory holds what is read; in the checkpoint's own type, on the CPU
    """
    chosen: Any = "auto" if mapped else dtype or (torch.float32 if device.type == "cpu" else "auto")
    placed: dict[str, Any] = {"device_map": "auto"} if spread else {}
    if device.type == "cuda" and not (spread or split or mapped or adapter):
        placed = {"device_map": {"": device}}  # weight by weight, without a copy of all in host memory
    if split:
        sharded.check_run(config, adapter)
        if chosen == "auto":  # DeepSpeed must know it before the weights are read
            chosen = config.get_text_config(decoder=True).dtype or config.dtype or torch.float32
    told: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # `check_complete` judges
    load = partial(model_class(config).from_pretrained, path, dtype=chosen, **told, **placed)
    with readable(path):
        try:
            with sharded.loading(chosen if split else None):
                try:
                    model, info = load(attn_implementation="eager" if caps_scores(config) else "sdpa")
                except ValueError as error:
                    if "attention" not in str(error):
                        raise
                    logger.info(f"{path} has no scaled-dot-product attention; it runs with eager attention")
                    model, info = load(attn_implementation="eager")
        except ValueError as error:
            of_config = str(error).startswith("Unrecognized configuration class")
            reason = "is no causal LM" if of_config else "cannot be loaded"
            raise ValueError(f"the target {path} ({config.model_type}) {reason}: {error}") from None
        except ImportError:  # of a package that a quantisation needs, not of the config
            raise
        except Exception:
            _check_can_be_built(path, config)
            raise
    check_complete(path, model, info)
    if model.dtype == torch.bfloat16 and device.type == "cuda" and not has_bfloat16():
        logger.warning(
            f"{torch.cuda.get_device_name(device)} computes bfloat16 by way of float32, slowly: take --dtype float16, "
            "where the target's states fit, or float32 (in training --target_dtype)"
        )
    hashes = None
    if adapter:
        model, hashes = _merge_adapter(model, adapter)
    if not placed and not split and not mapped:
        model.to(device)
    return model, hashes


def has_bfloat16() -> bool:
    """Whether torch's current GPU computes in bfloat16 itself."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _check_can_be_built(path: str, config: Any) -> None:
    """ValueError for a config.json from which transformers makes no model, whatever the weights are."""
    try:
        with torch.device("meta"):
            model_class(config).from_config(config)
    except Exception as error:
        raise ValueError(
            f"no model can be made from the config.json of {path} ({type(error).__name__}: {error}); copy it again"
        ) from None


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn what is raised for files that are cut short, for weights that cannot be joined as experts of which one is
    missing, and for a package that is not installed, into a ValueError."""
    try:
        yield
    except (SafetensorError, EOFError, UnpicklingError) as error:
        raise _unreadable(path, str(error)) from None
    except ImportError as error:  # of a quantisation
        raise ValueError(f"{path} cannot be loaded without a further package: {error}") from None
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error) or "unexpected EOF" in str(error):
            raise _unreadable(path, str(error)) from None
        if "conversion of the weights" not in str(error):  # transformers' words; its report above names them
            raise
        raise ValueError(
            f"the weights of each layer fit together; those of {path} named above do not, as some are missing or have "
            "other shapes; copy it again"
        ) from None


def _unreadable(path: str, why: str) -> ValueError:
    reason = why.splitlines()[0].partition(". ")[0] if why else "it is empty"  # torch goes on with advice
    return ValueError(
        f"{path} has weights that cannot be read ({reason}); a file was cut short, or holds no tensors but the address "
        "of a large file or a whole model: copy it again, as safetensors"
    )


def check_complete(path: str, model: nn.Module, info: dict[str, Any]) -> None:
    """ValueError for a checkpoint that lacks weights, or has them in another shape: transformers makes random ones; and
    for one with more than a layer's own, as its bias or the scales of int8 weights, without which it is another layer,
    and for one of a quantisation that transformers leaves out with a warning.

    info: of transformers' loading. What belongs to no layer of the model, as an image encoder's weights, may stay over.
    """
    lacking = [f"no {name}" for name in sorted(info["missing_keys"])]
    lacking += [f"{name} of shape {list(shape)}" for name, shape, _ in sorted(info["mismatched_keys"])]
    layers = {name for name, module in model.named_modules() if module._parameters}
    over = [name for name in sorted(info["unexpected_keys"]) if name.rpartition(".")[0] in layers]
    quantised = getattr(model, "hf_quantizer", None) is not None
    if (lacking or over) and not quantised and (method := _quantisation(model)):
        raise ValueError(
            f"the weights of a quantised checkpoint go with its scales; {path} is quantised by {method}, which this "
            "transformers does not know and would leave out; take the checkpoint that it was made from, or one of "
            "another quantisation"
        )
    if lacking:
        raise ValueError(
            f"a model has all weights that its config.json asks for; {path} has {_some(lacking)}; copy it again, or "
            "give the checkpoint of a causal LM"
        )
    if over and not quantised:
        raise ValueError(
            f"a layer takes all weights that the checkpoint has of it; those of {path} do not take {_some(over)}: "
            "config.json is of another model, or lacks the quantization_config; copy it again"
        )


def _quantisation(model: Any) -> str:
    """What a model's config.json says that its weights were quantised by; "" where it says nothing."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if found := getattr(config, "quantization_config", None):
            return str(found.get("quant_method") if isinstance(found, dict) else type(found).__name__)
    return ""


def _some(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join([*names[:3], *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])


def target_config(path: str) -> Any:
    """The config of a target's folder or hub id; ValueError for what cannot be one."""
    config = load_config(path)
    check_decoder_only(config, path)
    check_file(path)
    return config


def target_tokenizer(path: str, chat_template: str | None, adapter: str | None) -> PreTrainedTokenizerBase:
    """A target's tokenizer with the chat template that renders its prompts: the one given, its adapter's, its own."""
    name, settings = split_settings(chat_template)
    tokenizer = load_tokenizer(path, name)
    if adapter:
        tokenizer = _adapters_tokenizer(tokenizer, adapter, asked=name is not None)
    return with_settings(tokenizer, settings)


def _adapters_tokenizer(tokenizer: PreTrainedTokenizerBase, adapter: str, asked: bool) -> PreTrainedTokenizerBase:
    """A target's tokenizer with the chat template that its adapter comes with, as it was trained on that one, unless
    the tokenizer's was asked for; the adapter's own where it has other tokens (some that it adds, but for one to pad
    with) or where the template writes other ones (another beginning or end of texts). A line says what is taken.
    ValueError for what is no folder or hub id."""
    check_folder_or_hub_id("--target_adapter", adapter)
    if cached_file(adapter, "tokenizer_config.json", **MAY_BE_MISSING) is None:
        return tokenizer
    own = load_tokenizer(adapter, option="--target_adapter")
    if asked:
        own.chat_template = tokenizer.chat_template
    written = template_source(own) if own.chat_template else ""
    ends_differ = written and (own.bos_token, own.eos_token) != (tokenizer.bos_token, tokenizer.eos_token)
    known, entries = tokenizer.get_added_vocab(), tokenizer.get_vocab()
    added = any(
        known.get(token) != place if token in written else entries.get(token) != place and token != own.pad_token
        for token, place in own.get_added_vocab().items()
    )
    own.chat_template = own.chat_template or tokenizer.chat_template
    taken = ["a chat template"] if own.chat_template != tokenizer.chat_template else []
    if added or ends_differ:
        taken, chosen = ["tokens", *taken], own
    elif taken:
        chosen, tokenizer.chat_template = tokenizer, own.chat_template
    else:
        return tokenizer
    logger.info(f"--target_adapter {adapter} comes with {' and '.join(taken)}: taken in place of the target's own")
    return chosen


def _unshare(adapted: nn.Module) -> None:
    """Give every layer that an adapter changes weights of its own: merged into those of tied embeddings or of repeated
    layers, its change would be made to all that share them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = Counter(id(weight) for module in adapted.modules() for weight in module._parameters.values())
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            base = module.get_base_layer()
            for name, weight in list(base.named_parameters(recurse=False)):
                if owners[id(weight)] > 1:
                    setattr(base, name, deepcopy(weight))


def _merge_adapter(model: Any, adapter: str) -> tuple[Any, dict[str, str]]:
    """The model with a PEFT adapter merged into it, and the hashes of both before that."""
    from peft import PeftModel

    check_folder_or_hub_id("--target_adapter", adapter)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")  # which then have no effect
            adapted = PeftModel.from_pretrained(model, adapter)
        # again, for what it does not find a place for, under the names of today; embeddings may be in a file twice
        unread = adapted.load_adapter(adapter, "default", torch_device="cpu").unexpected_keys
        unread = [name for name in unread if ".modules_to_save." not in name and ".token_adapter." not in name]
        # before the merge, whose rounding depends on the type
        hashes = {**weights_hashes(adapted), "adapter_scaling": adapter_scaling(adapted)}
        _unshare(adapted)
        if getattr(model, "hf_quantizer", None) is not None:
            logger.warning(
                "--target_adapter %s is rounded into the target's quantized weights, so that its answers may be others "
                "than where the two stay apart; give the target without quantization to have them exact",
                adapter,
            )
        merged = adapted.merge_and_unload()
    except UserWarning as warning:
        missing = re.findall(r"'([^']+)'", str(warning))
        raise ValueError(
            f"a PEFT adapter has weights for every layer of the target that it changes; --target_adapter {adapter} has "
            f"no {_some(missing)}; give the target that it was trained on"
        ) from None
    except Exception as error:  # settings that their kind of adapter cannot use may raise any
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"--target_adapter {adapter} cannot be loaded and merged ({reason}); give a PEFT adapter's folder or hub "
            "id, of a kind that merges into the weights, as LoRA"
        ) from None
    if unread:
        raise ValueError(
            f"a PEFT adapter changes layers of the target alone; --target_adapter {adapter} has "
            f"{_some(sorted(unread))} beside them; give the target that it was trained on"
        )
    return merged, hashes
