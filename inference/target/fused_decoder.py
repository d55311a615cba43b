"""The forward of Llama-like decoders (Llama, Mistral, Qwen2, Qwen3) in few operations.

A small forward spends much of its time on launching operations; this one merges projections of the same states
(`linear.py`) and launches half as many as transformers' modules. The model's Linears become views of merged weights.

Shapes: B sequences, R rows of a forward, H hidden, N attention heads, G key/value heads, D head size, K keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.linear import MergedLinear, copy_pays
from draft_heads.inference.target.tree_attention import TREE_ATTENTION, TreeAttention, behind_text, masks_by_layer_type

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer's weights; projections of the same states are merged."""

    attention_norm: nn.Module
    qkv: MergedLinear  # H → (N + 2G)·D
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    output: MergedLinear  # N·D → H
    mlp_norm: nn.Module
    gate_up: MergedLinear  # H → 2·I
    down: MergedLinear  # I → H
    layer_type: str


class FusedDecoder:
    """Computes what `model.get_decoder()` computes over a preallocated cache, up to rounding."""

    def __init__(self, model: Any, layer_types: Sequence[str], window: int | None = None) -> None:
        """Merges the projections of `model` in place; it computes what it did before. See `can_drive`.

        layer_types: what each layer sees, the keys of the masks it will be called with; window: of sliding attention.
        """
        decoder, config = model.get_decoder(), model.config
        self.window, self.layer_types = window, set(layer_types)
        self.attention = "masked"
        self.embedding = model.get_input_embeddings()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = decoder.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self.norm = decoder.norm
        lm_head = model.get_output_embeddings()
        copy_weights = copy_pays(list(model.parameters()))
        self.logits = MergedLinear.of([lm_head], copy_weights)  # H → V
        self.rotary = decoder.rotary_emb
        self.layers = [
            self._fuse(layer, layer_type, copy_weights) for layer, layer_type in zip(decoder.layers, layer_types)
        ]

    @staticmethod
    def can_drive(model: Any) -> bool:
        """Whether the model is of the family, on one device, unquantised, with rotary positions of a fixed scale."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        weights = {(p.device, p.dtype) for p in model.parameters()}
        return (
            config.model_type in FAMILY
            and config.hidden_act == "silu"
            and rope.get("rope_type", "default") in ("default", "linear", "llama3")
            and len(weights) == 1
            and all(dtype.is_floating_point for _, dtype in weights)
        )

    def without_layers(self, skipped: Collection[int]) -> FusedDecoder:
        """A decoder that shares the weights and skips the layers with these indices."""
        shorter = copy(self)
        shorter.layers = [layer for index, layer in enumerate(self.layers) if index not in skipped]
        shorter.layer_types = {layer.layer_type for layer in shorter.layers}
        return shorter

    @staticmethod
    def _fuse(layer: Any, layer_type: str, copy_weights: bool) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        return FusedLayer(
            layer.input_layernorm,
            MergedLinear.of([attention.q_proj, attention.k_proj, attention.v_proj], copy_weights),
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
            MergedLinear.of([attention.o_proj], copy_weights),
            layer.post_attention_layernorm,
            MergedLinear.of([mlp.gate_proj, mlp.up_proj], copy_weights),
            MergedLinear.of([mlp.down_proj], copy_weights),
            layer_type,
        )

    def __call__(
        self, token_ids: Tensor, depths: Tensor, sees: Tensor, cache: KVCache, target_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden `[B, R, H]` and aux_hidden `[B, R, k·H]` as in `Target.forward_tree`; copies nothing to the host."""
        if not torch.compiler.is_compiling():  # whoever calls a compiled program has done this
            cache.allocate(self.like)
            cache.set_visible_length(token_ids.shape[1])
        assert cache.rows is not None
        end = cache.rows.shape[2]
        positions = depths + cache.lengths[:, None]
        visible, key_positions = behind_text(sees, positions, cache.lengths, end)
        masks = masks_by_layer_type(visible, positions, key_positions, self.window, self.layer_types)
        attention = TREE_ATTENTION[self.attention](masks, self.heads // self.kv_heads, self.dtype)
        states = self.embedding(token_ids)
        slots = cache.slots(token_ids.shape[1])
        return self._layers(states, *self._rotation(positions), slots, attention, cache, target_layers)

    @property
    def dtype(self) -> torch.dtype:
        """The type of states and weights."""
        dtype: torch.dtype = self.embedding.weight.dtype
        return dtype

    @property
    def like(self) -> Tensor:
        """An empty tensor [1, G, 0, D] of a cache's heads, head size, type and device."""
        return self.embedding.weight.new_empty(1, self.kv_heads, 0, self.head_dim)

    def _layers(
        self,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        attention: TreeAttention,
        cache: KVCache,
        target_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Every layer in turn. Rows go to `slots [B, R]` of the cache."""
        outputs = [states]
        batch, rows, _ = states.shape
        repeat = self.heads // self.kv_heads
        for index, layer in enumerate(self.layers):
            merged = layer.qkv(self._normed(states, layer.attention_norm))
            merged = merged.view(batch, rows, -1, self.head_dim)  # [B, R, N + 2G, D]
            queries_keys, values = merged.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            if layer.q_norm is not None:
                queries, keys = queries_keys.split([self.heads, self.kv_heads], dim=2)
                queries_keys = torch.cat([self._normed(queries, layer.q_norm), self._normed(keys, layer.k_norm)], dim=2)
            rotated = torch.addcmul(queries_keys * cos, queries_keys.roll(self.head_dim // 2, -1), sin)
            queries, keys = rotated.transpose(1, 2).split([self.heads, self.kv_heads], dim=1)
            keys, values = cache.write(index, slots, keys, values.transpose(1, 2))
            # queries that share a key head become rows of one product, so keys are not repeated
            queries = queries.reshape(batch, self.kv_heads, repeat * rows, self.head_dim)
            attended = attention(layer.layer_type, queries, keys, values)
            attended = attended.view(batch, self.heads, rows, self.head_dim).transpose(1, 2).reshape(batch, rows, -1)
            states = states + layer.output(attended)
            gate, up = layer.gate_up(self._normed(states, layer.mlp_norm)).chunk(2, dim=-1)
            states = states + layer.down(F.silu(gate) * up)
            outputs.append(states)
        aux_hidden = torch.cat([outputs[layer] for layer in target_layers], dim=-1) if target_layers else None
        return self._normed(states, self.norm), aux_hidden

    def _normed(self, states: Tensor, norm: Any) -> Tensor:
        """RMSNorm as transformers computes it: in float32 whatever the states' type, float64 included."""
        if states.dtype == torch.float32:
            return F.rms_norm(states, (states.shape[-1],), norm.weight, self.eps)
        return norm(states)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[..., 1, D]` of positions `[...]`; the first half of sin is negated, for `roll`."""
        angles = positions[..., None, None].float() * self.rotary.inv_freq
        cos, sin = angles.cos() * self.rotary.attention_scaling, angles.sin() * self.rotary.attention_scaling
        return torch.cat([cos, cos], dim=-1).to(self.dtype), torch.cat([-sin, sin], dim=-1).to(self.dtype)
