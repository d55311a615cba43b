"""A frozen target whose weights are split among the processes of a run: DeepSpeed's ZeRO-3, for the target alone.

Every process holds its share of each weight; a layer is gathered for its forward and given back. Embedding and LM head
stay whole on every process, because heads read them. All processes must run the same number of forwards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_MEMORY = {"stage": 3, "memory_efficient_linear": False}  # which would replace torch's `linear` in the whole process


def _zero_3(dtype: torch.dtype, **memory: Any) -> dict[str, Any]:
    """DeepSpeed's configuration for weights of a type; without it every weight would become float32."""
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    precision = {half: {"enabled": True}} if half else {}
    return {"train_micro_batch_size_per_gpu": 1, **precision, "zero_optimization": {**_MEMORY, **memory}}


def check_run(config: Any, adapter: str | None) -> None:
    """ValueError where a target cannot be split: one process, an adapter to merge, quantised weights."""
    reason = ""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        reason = "this run has one; start several, as `deepspeed --num_gpus 8 train/ctc.py …`"
    elif adapter:
        reason = f"an adapter ({adapter}) must be merged into whole weights; merge it and save the model first"
    elif getattr(config, "quantization_config", None) is not None:
        reason = "quantised weights cannot be split; take the unquantised target"
    if reason:
        raise ValueError(f"--shard_target splits the target among the processes of a run; {reason}, or leave it out")


@contextmanager
def loading(split: torch.dtype | None) -> Iterator[None]:
    """transformers' `from_pretrained` splits weights in here, or does not (None), whatever the head's own ZeRO stage.

    split: the weights' type, which DeepSpeed gives them
    """
    from transformers.integrations import deepspeed as integration

    given: Any = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    own = integration.HfDeepSpeedConfig(_zero_3(split)) if split else None
    try:
        yield
    finally:
        del own
        integration._hf_deepspeed_config_weak_ref = given


def is_split(parameter: Tensor) -> bool:
    """Whether this process holds a share of the parameter only."""
    return hasattr(parameter, "ds_id")


def whole(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
    """Split parameters are whole in here, on every process; all must enter."""
    split = [parameter for parameter in parameters if is_split(parameter)]
    if not split:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(split)


def size_of(parameter: Tensor) -> int:
    """Values of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_copy(module: nn.Module) -> nn.Module:
    """A copy of a module with plain parameters; called on every process."""
    with whole(module.parameters()):
        plain: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in module.parameters()
        }
        return deepcopy(module, plain)


def two_layers(decoder: nn.Module, layers: int) -> int:
    """Values of about two layers of a decoder, whole at once while it runs."""
    return 2 * sum(size_of(p) for p in decoder.parameters()) // layers


def gather_in_forward(decoder: nn.Module, layers: int, dtype: torch.dtype) -> None:
    """The decoder's layers are gathered from now on when its forward reaches them, about two at a time."""
    import deepspeed

    memory = {"stage3_max_live_parameters": two_layers(decoder, layers), "stage3_max_reuse_distance": 0}
    deepspeed.initialize(model=decoder, config=_zero_3(dtype, **memory))
    rounded = [name for name, buffer in decoder.named_buffers() if "inv_freq" in name and buffer.dtype.itemsize < 4]
    if rounded:
        raise ValueError(
            f"--shard_target needs rotary frequencies in float32; DeepSpeed {deepspeed.__version__} and transformers "
            f"{transformers.__version__} round {rounded[0]} to {str(dtype).removeprefix('torch.')}; install DeepSpeed "
            "0.19.8 and transformers 5.24, or leave it out"
        )
    if rounded := kept_in_float32(decoder, dtype):
        logger.warning(
            "--shard_target rounds %s, which the model keeps in float32 where the checkpoint has it so, to %s: labels "
            "and states may be others than the whole target's; train with --target_dtype float32, or without it",
            rounded[0],
            str(dtype).removeprefix("torch."),
        )


def kept_in_float32(decoder: nn.Module, dtype: torch.dtype) -> list[str]:
    """Names of weights in fewer bits that transformers would keep in float32, as what chooses experts."""
    names = set(getattr(decoder, "_keep_in_fp32_modules_strict", None) or ())
    names |= set(getattr(decoder, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    kept = [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in names]
    few = [name for name, weight in decoder.named_parameters() if weight.dtype.itemsize < 4]
    return [name for name in few if any(one.search(name) for one in kept)]


def gather_until_step(module: nn.Module) -> None:
    """ZeRO-3 gathers all of a trained module for a forward and splits it again in the optimizer's step.

    For modules whose losses read weights outside of a submodule's forward, or again in the backward pass: DeepSpeed's
    own hooks would have split those by then. It keeps whole what a submodule is at work on; one more is made up here.
    """

    def gather(module: nn.Module, args: Any) -> None:
        split: list[Any] = [p for p in module.parameters() if is_split(p)]
        if split and torch.is_grad_enabled():
            split[0].all_gather(split)
            for parameter in split:
                parameter.ds_active_sub_modules.add(-1)

    module.register_forward_pre_hook(gather)
