"""The decoder of any architecture through transformers' own modules, with our masks, and the outputs of its layers.

Shapes: B batch, R rows of a forward, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from draft_heads.heads.config import check_target_layers
from draft_heads.inference.target.architecture import Architecture
from draft_heads.inference.target.library_names import CACHE


class ModuleDecoder:
    """Runs a model's decoder as it is; `FusedDecoder` is the fast one of Llama-like models."""

    def __init__(self, decoder: Any, config: Any, architecture: Architecture, dtype: torch.dtype) -> None:
        """config: of the text model; dtype: of its states."""
        self.decoder, self.config, self.architecture, self.dtype = decoder, config, architecture, dtype

    @property
    def layers(self) -> nn.ModuleList | None:
        """The decoder's layers, whatever the architecture calls them."""
        lists = (child for child in self.decoder.children() if isinstance(child, nn.ModuleList))
        return next((found for found in lists if len(found) == self.config.num_hidden_layers), None)

    def check_layers(self, target_layers: Sequence[int], name: str) -> None:
        """ValueError unless the outputs of these layers, counted from 1, can be captured; not the last one's."""
        if target_layers and self.layers is None:
            raise ValueError(
                f"target_layers must be left out for {name}, whose layers cannot be read one by one; got "
                f"{' '.join(map(str, target_layers))}"
            )
        check_target_layers(target_layers, self.config.num_hidden_layers, name)

    @contextmanager
    def _capture_outputs(self, target_layers: Sequence[int], device: torch.device) -> Iterator[list[Tensor]]:
        """Collects the outputs of layers on a device, in their order, while the decoder runs in this thread; ValueError
        for layers that give several states of each token, as Gemma 3n's."""
        outputs: list[Tensor] = []
        thread = get_ident()

        def keep(module: Any, args: Any, output: Any) -> None:
            if get_ident() != thread:
                return
            states = output[0] if isinstance(output, tuple) else output
            if states.dim() != 3:
                raise ValueError(
                    "target_layers must be left out where a layer gives several states of a token; those of "
                    f"{self.config.model_type} have shape {list(states.shape)}"
                )
            outputs.append(states.to(device))

        layers = self.layers
        hooks = [layers[layer - 1].register_forward_hook(keep) for layer in target_layers] if layers else []
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        masks: dict[str, Tensor] | None = None,
        cache: Any = None,
        target_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden `[B, R, H]` and aux_hidden `[B, R, k·H]` of tokens `[B, R]`, on their device.

        masks: of each type of layer, [B, R, keys] bool; None: the model's own causal ones
        """
        as_taken = {kind: mask[:, None] for kind, mask in (masks or {}).items()}
        if masks and self.config._attn_implementation == "eager":  # it adds masks to the scores
            lowest = torch.finfo(self.dtype).min
            as_taken = {
                kind: torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, lowest)
                for kind, mask in as_taken.items()
            }
        mask: Any = None
        if masks is not None:
            mask = as_taken if self.architecture.by_layer_type else next(iter(as_taken.values()))
        with self._capture_outputs(target_layers, token_ids.device) as outputs:
            hidden: Tensor = self.decoder(
                input_ids=token_ids,
                attention_mask=mask,
                # drafts may reach beyond the longest text; none is accepted there
                position_ids=positions.clamp(max=self.architecture.max_positions - 1),
                use_cache=cache is not None,
                **{CACHE: cache},
            ).last_hidden_state
        # the layers of a spread target lie on several devices
        return hidden.to(token_ids.device), torch.cat(outputs, dim=-1) if outputs else None
