"""Whether a model still has the weights that were merged, copied or captured, and what is done where it has not."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draft_heads.inference.target.fused_decoder import FusedDecoder
from draft_heads.inference.target.library_names import forward_hooks
from draft_heads.inference.target.probe import LOGITS_NUMBERS, probe

Target = Any  # a `target.Target`, whose module imports this one

logger = logging.getLogger(__name__)


class WeightsSeen:
    """What a model held when it was looked at; looking again copies nothing from a GPU.

    Compared are the modules, their forwards with the hooks on them, the parameters and buffers themselves, their
    addresses and the counters of their updates, the window, and the numbers that modules and logits are computed with.
    An update through `.data` changes none of these, so in float32 on a CPU, where the decoder holds copies, one value
    of each row is compared too: of [N, K] that of row r in column r mod K. Elsewhere the decoder reads the updated
    memory itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held, self._numbers = _held(model)
        parameters = [one for one in self._held if isinstance(one, nn.Parameter)]
        self.place = parameters[0].device, parameters[0].dtype
        read = (one for one in parameters if one.device.type == "cpu" and one.dtype == torch.float32)
        self._views = [view for one in read for view in _sampled(one)]
        self._values = self._sample()

    def still_in(self, model: nn.Module) -> bool:
        """Whether nothing was laid on, replaced, moved or updated."""
        held, numbers = _held(model)
        return (
            numbers == self._numbers
            and len(held) == len(self._held)
            and all(one is other for one, other in zip(held, self._held))
            and self._values == self._sample()
        )

    def _sample(self) -> bytes:
        return b"".join(view.tobytes() for view in self._views)


def _held(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Every module, its forward, hook, parameter and buffer of a model; its window, number and types of layers (a model
    runs as many as its config says), the numbers of its logits, every number that a module keeps, every parameter's
    and buffer's counter of updates and address."""
    held: list[Any] = []
    own: Any = model.config
    config = own.get_text_config(decoder=True)
    numbers: list[Any] = [getattr(config, name, None) for name in ("sliding_window", "num_hidden_layers")]
    numbers += getattr(config, "layer_types", None) or ()
    numbers += [getattr(config, name, None) for name in LOGITS_NUMBERS]
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        held += [module, type(module).forward, *forward_hooks(module)]
        numbers += [value for value in vars(module).values() if type(value) is float]  # as factors of scores
        for tensor in (*module._parameters.values(), *(() if _remakes_buffers(module) else module._buffers.values())):
            if tensor is not None:
                held.append(tensor)
                numbers.append(_updates(tensor))
                # a quantised weight, of a class of its own, may have no address
                numbers.append(tensor.data_ptr() if type(tensor) in (nn.Parameter, Tensor) else 0)
        waiting += module._modules.values()
    return held, numbers


def _remakes_buffers(module: nn.Module) -> bool:
    """Whether a module's forward itself sets its buffers: rotary frequencies that follow the length of the text."""
    rope_type = getattr(module, "rope_type", None)  # of a module with several a dict
    return any(word in str(rope_type) for word in ("dynamic", "longrope"))


def drops_out(module: nn.Module) -> bool:
    """Whether a module sets values to 0 at random now."""
    p = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "attention_dropout", 0.0)
    return module.training and isinstance(p, float) and p > 0


def _updates(tensor: Tensor) -> int:
    """How often it was written to in place; 0 where torch does not count: tensors that were made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _sampled(parameter: Tensor) -> list[NDArray[np.float32]]:
    """Views of one value of each row, of row r that in column r mod the width: they show what is in the memory whenever
    they are read."""
    array = parameter.detach().numpy()
    if not array.flags.c_contiguous:  # a part of another tensor, or a transposed one
        return [array]
    values = array.ravel()
    width = parameter.shape[-1] if parameter.ndim > 1 and parameter.numel() else 1
    whole = values.size // width**2  # squares of rows, whose diagonals they are
    squares, rest = values[: whole * width**2].reshape(whole, width**2), values[whole * width**2 :]
    return [squares[:, :: width + 1], rest[:: width + 1]]


def merge_weights(target: Target) -> None:
    """Give the target its fused forward; where that fails or answers otherwise than the modules, a warning says so."""
    fits = False
    try:
        with torch.inference_mode(False):  # the model's weights become parts of merged ones
            target._fused = FusedDecoder(target.model, target.layer_types, target.window)
            probe(target)
            target._fused.attention = target.attention
        fits = True
    except ValueError as error:
        logger.warning("%s decodes more slowly, through its modules and without CUDA graphs: %s", target.name, error)
        target.modules_only = True
    finally:
        if not fits:
            target._fused = None
        if target.seen is not None:
            target.seen = WeightsSeen(target.model)  # merging moves weights


def look_again(target: Target) -> None:
    """Take in changes of the model, if there are any; ValueError for one that drops values out now."""
    if any(map(drops_out, target.model.modules())):
        raise ValueError(
            f"a target's tokens are those without dropout; {target.name} is in training mode; call model.eval()"
        )
    if target.seen is not None and not target.seen.still_in(target.model):
        take_in_changes(target)


def take_in_changes(target: Target) -> None:
    """Merge and probe the model anew; ValueError for what was made for the old weights and cannot follow."""
    seen = WeightsSeen(target.model)
    before, now = (f"{dtype} on {device}" for device, dtype in (target.seen.place, seen.place))
    if before != now:
        raise ValueError(
            f"a target stays where it is and of its type; {target.name} was {before} and is {now}; make a new Target, "
            "with new drafters and engines"
        )
    target.changes += 1
    target.seen._held = []  # a trial that fails leaves nothing that a later look may find unchanged
    target.__dict__.pop("_weights_hashes", None)
    target._take_parts()
    target._try_out()
    target.seen = seen
    logger.info("the weights or hooks of %s have changed: they were read and tried again", target.name)
