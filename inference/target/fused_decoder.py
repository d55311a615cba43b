"""The forward of Llama-like decoders in few operations: layers of attention and a gated MLP, norms before or after.

A small forward spends much of its time on launching operations; this one merges projections of the same states
(`linear.py`) and launches half as many as transformers' modules. The model's Linears become views of merged weights.
What a layer has is read from its modules. `Target` compares the result with the modules' once, and falls back on them
where it differs; but a short text cannot show every difference, so only architectures whose code was read are served.

Shapes: B sequences, R rows of a forward, H hidden, N attention heads, G key/value heads, D head size, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from draft_heads.data.common.pretrained import rope_settings
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.library_names import forward_hooks
from draft_heads.inference.target.linear import MergedLinear, copy_pays
from draft_heads.inference.target.tree_attention import (
    MaskedAttention,
    masks_by_layer_type,
    tree_attention,
    visible_keys,
)

ARCHITECTURES = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "granite", "gemma", "gemma3_text", "olmo2", "olmo3",
    "seed_oss", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text",
)  # fmt: skip
"""`model_type` of the text models served; not, say, olmo (clips projections) or gemma2 (caps attention scores)."""
_NORMS = {
    "input_layernorm post_attention_layernorm": (0, 2),
    "post_attention_layernorm post_feedforward_layernorm": (1, 3),
    "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm": (0, 1, 2, 3),
}
"""A layer's norms, in the order of its modules → where each stands: 0 before attention, 1 after it, 2 before the MLP,
3 after it."""
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
_MLP = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
_ROPES = ("default", "linear", "llama3", "yarn")  # of frequencies that do not depend on the length
_ROTATE_IN_FLOAT32 = ("olmo2", "olmo3")  # the others round cos and sin to the type of their states


class Norm:
    """A norm of the model in few operations, where it is an RMSNorm by its weight or by one plus it, read in each call.

    In half precision that rounds once, where the model's own norm may round before it multiplies by the weight. One
    plus the weight is a sum in float32, as in the model: rounded, a channel would have another gain at all positions.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plus: int | None = None  # what is added to the weight; None: the module computes
        weight: Any = getattr(module, "weight", None)
        self.size = 0 if weight is None else weight.numel()
        self.eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or self.eps is None or weight.dtype == torch.float64:
            return  # RMSNorms compute in float32 even there
        if weight.is_meta:
            self.plus = 0
            return
        exact = 1e-4 if weight.dtype == torch.float32 else 2 * torch.finfo(weight.dtype).eps
        sample = torch.linspace(-2, 3, weight.numel(), device=weight.device, dtype=weight.dtype)
        own, errors = module(sample), dict[int, float]()
        for plus in (0, 1):
            fused = self._normed(sample, plus)
            if torch.allclose(fused, own, rtol=exact, atol=1e-6):  # of large weights in half precision both may be
                errors[plus] = (fused.double() - own.double()).abs().sum().item()
        self.plus = min(errors, key=errors.__getitem__, default=None)

    def __call__(self, states: Tensor) -> Tensor:
        if self.plus is None:
            normed: Tensor = self.module(states)
            return normed
        return self._normed(states, self.plus)

    def _normed(self, states: Tensor, plus: int) -> Tensor:
        weight: Any = self.module.weight
        if not plus:
            return F.rms_norm(states, weight.shape, weight, self.eps)
        return F.rms_norm(states.float(), weight.shape, weight.float() + plus, self.eps).to(states.dtype)


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer's weights; projections of the same states are merged."""

    norms: tuple[Norm | None, ...]  # before attention, after it, before the MLP, after it
    qkv: MergedLinear  # H → (N + 2G)·D
    q_norm: Norm | None
    k_norm: Norm | None
    scale: float  # of the scores, in most models 1 / √D
    output: MergedLinear  # N·D → H
    gate_up: MergedLinear  # H → 2·I
    activation: Callable[[Tensor], Tensor]
    down: MergedLinear  # I → H
    residual_scale: float  # of what attention and MLP add
    layer_type: str


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """The parts that compute something in evaluation."""
    return {name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _is_known(layer: nn.Module) -> bool:
    """Whether a decoder layer has the parts of a `FusedLayer` and no others."""
    parts = _children(layer)
    attention, mlp = parts.pop("self_attn", None), parts.pop("mlp", None)
    if attention is None or mlp is None or " ".join(parts) not in _NORMS or list(attention.parameters(recurse=False)):
        return False
    projections = {"attention": _children(attention), "mlp": _children(mlp)}
    names = {part: {name for name in found if name.endswith("_proj")} for part, found in projections.items()}
    others = set(projections["attention"]) - names["attention"]
    linears = [projections[part][name] for part in names for name in names[part]]
    return (
        names["attention"] in _ATTENTION
        and names["mlp"] in _MLP
        and others in (set(), {"q_norm", "k_norm"})
        and set(projections["mlp"]) - names["mlp"] <= {"act_fn", "activation_fn"}
        and all(type(linear) is nn.Linear for linear in linears)
        and hasattr(attention, "scaling")
        and hasattr(attention, "head_dim")
    )


class FusedDecoder:
    """Computes what `model.get_decoder()` computes over a preallocated cache, up to rounding."""

    def __init__(self, model: Any, layer_types: Sequence[str], window: int | None = None) -> None:
        """Merges the projections of `model` in place; it computes what it did before. See `can_drive`.

        layer_types: what each layer sees, the keys of the masks it will be called with; window: of sliding attention.
        """
        decoder = model.get_decoder()
        self.window, self.layer_types = window, set(layer_types)
        self.attention = "auto"
        self.embedding = model.get_input_embeddings()
        self.embedding_scale = float(getattr(decoder, "embedding_multiplier", 1.0))
        self.heads, self.kv_heads = decoder.config.num_attention_heads, decoder.config.num_key_value_heads
        self.head_dim = decoder.layers[0].self_attn.head_dim
        self.norm = Norm(decoder.norm)
        lm_head = model.get_output_embeddings()
        copy_weights = copy_pays([*decoder.parameters(), *lm_head.parameters()])
        self.logits = MergedLinear.of([lm_head], copy_weights)  # H → V
        self.rotary = decoder.rotary_emb
        self.rotates_in_float32 = decoder.config.model_type in _ROTATE_IN_FLOAT32
        # frequencies are the same for all layers, or each layer type has its own
        self.ropes = {kind: f"{kind}_" if hasattr(self.rotary, f"{kind}_inv_freq") else "" for kind in layer_types}
        self.layers = [
            self._fuse(layer, layer_type, copy_weights) for layer, layer_type in zip(decoder.layers, layer_types)
        ]

    @staticmethod
    def can_drive(model: Any) -> bool:
        """Whether the architecture is served, unquantised, on one device, its rotary frequencies fixed, and no hook has
        to see a module's forward."""
        decoder, lm_head = model.get_decoder(), model.get_output_embeddings()
        if decoder.config.model_type not in ARCHITECTURES:
            return False
        kinds = {rope.get("rope_type", "default") for rope in rope_settings(decoder.config)}
        frequencies = [buffer for name, buffer in decoder.rotary_emb.named_buffers() if name.endswith("inv_freq")]
        weights = {(p.device, p.dtype, type(p.data)) for module in (decoder, lm_head) for p in module.parameters()}
        return (
            kinds <= set(_ROPES)
            and len(weights) == 1  # quantised weights have a dtype or a class of their own
            and all(dtype.is_floating_point and kind is Tensor for _, dtype, kind in weights)
            and type(lm_head) is nn.Linear
            and all(_is_known(layer) for layer in decoder.layers)
            and not any(map(forward_hooks, model.modules()))
            and {2 * len(f) for f in frequencies} == {layer.self_attn.head_dim for layer in decoder.layers}
        )

    def without_layers(self, skipped: Collection[int]) -> FusedDecoder:
        """A decoder that shares the weights and skips the layers with these indices."""
        shorter = copy(self)
        shorter.layers = [layer for index, layer in enumerate(self.layers) if index not in skipped]
        shorter.layer_types = {layer.layer_type for layer in shorter.layers}
        return shorter

    @staticmethod
    def _fuse(layer: Any, layer_type: str, copy_weights: bool) -> FusedLayer:
        attention, mlp, parts = layer.self_attn, layer.mlp, _children(layer)
        norms: list[Norm | None] = [None] * 4
        names = [name for name in parts if name not in ("self_attn", "mlp")]
        for place, name in zip(_NORMS[" ".join(names)], names):
            norms[place] = Norm(parts[name])
        normed = hasattr(attention, "q_norm")

        def merged(module: Any, names: str) -> MergedLinear:
            return MergedLinear.of([getattr(module, name) for name in names.split()], copy_weights)

        activation = getattr(mlp, "act_fn", None) or mlp.activation_fn
        return FusedLayer(
            tuple(norms),
            merged(attention, "qkv_proj" if hasattr(attention, "qkv_proj") else "q_proj k_proj v_proj"),
            Norm(attention.q_norm) if normed else None,
            Norm(attention.k_norm) if normed else None,
            float(attention.scaling),
            merged(attention, "o_proj"),
            merged(mlp, "gate_up_proj" if hasattr(mlp, "gate_up_proj") else "gate_proj up_proj"),
            F.silu if isinstance(activation, (nn.SiLU, SiLUActivation)) else activation,
            merged(mlp, "down_proj"),
            float(getattr(layer, "residual_multiplier", 1.0)),
            layer_type,
        )

    def __call__(
        self, token_ids: Tensor, depths: Tensor, sees: Tensor, cache: KVCache, target_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden `[B, R, H]` and aux_hidden `[B, R, k·H]` as in `Target.forward_tree`; copies nothing to the host."""
        cache.allocate(self.like)
        cache.set_visible_length(token_ids.shape[1])
        assert cache.rows is not None
        end = cache.rows.shape[2]
        positions = depths + cache.lengths[:, None]
        visible, key_positions = visible_keys(sees, positions, cache.lengths, end)
        masks = masks_by_layer_type(visible, positions, key_positions, self.window, self.layer_types)
        attention = tree_attention(self.attention, masks, self.heads, self.kv_heads, self.dtype)
        states = _scaled(self.embedding(token_ids), self.embedding_scale)
        rotations = {rope: self._rotation(positions, rope) for rope in set(self.ropes.values())}
        slots = cache.slots(token_ids.shape[1])
        return self._layers(states, rotations, slots, attention, cache, target_layers)

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
        rotations: dict[str, tuple[Tensor, Tensor]],
        slots: Tensor,
        attention: MaskedAttention,
        cache: KVCache,
        target_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Every layer in turn. Rows go to `slots [B, R]` of the cache."""
        outputs = [states]
        batch, rows, _ = states.shape
        repeat = self.heads // self.kv_heads
        for index, layer in enumerate(self.layers):
            before_attention, after_attention, before_mlp, after_mlp = layer.norms
            merged = layer.qkv(before_attention(states) if before_attention else states)
            if layer.q_norm is not None and layer.k_norm is not None:
                merged = self._normed_heads(merged, layer.q_norm, layer.k_norm)
            merged = merged.view(batch, rows, -1, self.head_dim)  # [B, R, N + 2G, D]
            queries_keys, values = merged.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            cos, sin = rotations[self.ropes[layer.layer_type]]
            rotated = torch.addcmul(queries_keys * cos, queries_keys.roll(self.head_dim // 2, -1), sin).to(self.dtype)
            queries, keys = rotated.transpose(1, 2).split([self.heads, self.kv_heads], dim=1)
            keys, values = cache.write(index, slots, keys, values.transpose(1, 2))
            # queries that share a key head become rows of one product, so keys are not repeated
            queries = queries.reshape(batch, self.kv_heads, repeat * rows, self.head_dim)
            attended = attention(layer.layer_type, queries, keys, values, layer.scale)
            by_head = attended.unflatten(2, (repeat, rows))  # [B, G, N/G, R, D]
            added = layer.output(by_head.permute(0, 3, 1, 2, 4).reshape(batch, rows, -1))
            states = states + _scaled(after_attention(added) if after_attention else added, layer.residual_scale)
            gate, up = layer.gate_up(before_mlp(states) if before_mlp else states).chunk(2, dim=-1)
            added = layer.down(layer.activation(gate) * up)
            states = states + _scaled(after_mlp(added) if after_mlp else added, layer.residual_scale)
            outputs.append(states)
        aux_hidden = torch.cat([outputs[layer] for layer in target_layers], dim=-1) if target_layers else None
        return self.norm(states), aux_hidden

    def _normed_heads(self, merged: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
        """[..., (N + 2G)·D] with queries and keys normed: each head alone, or all heads together."""
        queries, keys, values = merged.split([n * self.head_dim for n in (self.heads, *[self.kv_heads] * 2)], dim=-1)
        if q_norm.size == self.head_dim:
            queries, keys = (part.unflatten(-1, (-1, self.head_dim)) for part in (queries, keys))
            return torch.cat([q_norm(queries).flatten(-2), k_norm(keys).flatten(-2), values], dim=-1)
        return torch.cat([q_norm(queries), k_norm(keys), values], dim=-1)

    def _rotation(self, positions: Tensor, rope: str) -> tuple[Tensor, Tensor]:
        """cos and sin `[..., 1, D]` of positions `[...]`; the first half of sin is negated, for `roll`."""
        frequencies, scale = (getattr(self.rotary, f"{rope}{name}") for name in ("inv_freq", "attention_scaling"))
        angles = positions[..., None, None].float() * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        dtype = torch.promote_types(self.dtype, torch.float32) if self.rotates_in_float32 else self.dtype
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def _scaled(states: Tensor, scale: float) -> Tensor:
    return states if scale == 1.0 else states * scale
