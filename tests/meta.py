"""Rehearsing GPU code without a GPU: on the meta device nothing is computed, but shapes, types and devices are real."""

import weakref
from collections import Counter
from typing import ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class NoHostValues(TorchFunctionMode):
    """Refuses what would read a tensor on the host, or make one from host data.

    masks_keep_all: a boolean index, whose size depends on values, selects everything; else it is refused.
    """

    reads: ClassVar = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"}
    makes: ClassVar = {"tensor", "as_tensor", "from_numpy", "frombuffer", "pin_memory", "cuda"}

    def __init__(self, masks_keep_all=False):
        super().__init__()
        self.masks_keep_all = masks_keep_all

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in self.reads | self.makes, f"{name} moves values between host and device"
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            first = index[0]
            if isinstance(first, torch.Tensor) and first.dtype == torch.bool:
                assert self.masks_keep_all and name == "__getitem__", "the size of a boolean index depends on values"
                kept = args[0].flatten(0, first.dim() - 1) if first.dim() > 1 else args[0].clone()
                return kept[(slice(None), *index[1:])] if index[1:] else kept
            scalar = any(isinstance(i, torch.Tensor) and i.dim() == 0 for i in index)
            assert not scalar, "a 0-dimensional tensor as an index is read on the host"
        return function(*args, **(kwargs or {}))


class MetaOnly(TorchDispatchMode):
    """Refuses tensors on any other device; counts operations, and the bytes of what was made inside and still lives."""

    views: ClassVar = {
        *("view", "expand", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "permute", "detach", "alias"),
        *("split", "split_with_sizes", "_unsafe_view", "as_strided", "unbind", "chunk", "unfold", "_reshape_alias"),
    }

    def __init__(self):
        super().__init__()
        self.kernels, self.alive, self.peak, self.known = Counter(), 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if name not in self.views:
            self.kernels[name] += 1
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", (
                f"{function} has a tensor on {tensor.device}"
            )
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known.add(storage)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._release, storage.nbytes())
        return result

    def _release(self, size):
        self.alive -= size
