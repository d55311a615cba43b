"""The one decoder block heads share: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B batch, Q queries, C context states, H hidden, N attention heads, G key/value heads, D head size.

Queries and context are separate inputs: context states only ever lend keys and values, so those can be computed once
and kept (`context_keys_values`), while the queries run through the whole block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.data.common.pretrained import rope_settings
from draft_heads.heads.config import HeadConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [B, N, Q, D], their own keys [B, G, Q, D], values [B, G, Q, D]) → [B, N, Q, D]; the caller knows the
context and who may see what."""


Rotation = tuple[Tensor, Tensor]
"""cos and sin `[B, 1, L, D]` of rotary position embedding, the first half of sin negated; see `rotary`."""


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Rotation:
    """The rotation of integer positions `[B, L]`, computed in float32."""
    half = torch.arange(0, -head_dim, -2, dtype=torch.float32, device=positions.device)
    frequencies = theta ** (half / head_dim)
    angles = positions[:, None, :, None] * torch.cat([-frequencies, frequencies])
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary embedding to `[B, heads, L, D]` (pairs are D/2 apart)."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


LLAMA_NAMES = {
    "input_layernorm": "attention_norm",
    **{f"self_attn.{name}_proj": f"{name}_proj" for name in "qkvo"},
    "post_attention_layernorm": "mlp_norm",
    **{f"mlp.{name}_proj": f"{name}_proj" for name in ("gate", "up", "down")},
}
"""A Llama layer's names → this block's."""


def _unlike_llama(layer: Any, head_dim: int) -> list[str]:
    """Parts of a layer with Llama's weights that compute something else: Gemma's norms, Granite's scales."""
    norm, grid = layer.input_layernorm, torch.linspace(-4, 4, 32)
    states = torch.linspace(-1, 1, norm.weight.numel()).to(norm.weight)
    normed = type(norm).forward(norm, states)  # not through hooks, which would split weights again (ZeRO-3)
    plain = F.rms_norm(states, states.shape, norm.weight)
    activation = getattr(layer.mlp, "act_fn", None)
    unlike = {
        "input_layernorm": (normed - plain).norm() > 0.02 * plain.norm(),
        "mlp.act_fn": activation is None or not torch.allclose(activation(grid), F.silu(grid), atol=1e-4),
        "self_attn.scaling": abs(getattr(layer.self_attn, "scaling", 0) * head_dim**0.5 - 1) > 1e-4,
        "self_attn.rotation": _rotates_otherwise(layer.self_attn),
        "residual_multiplier": getattr(layer, "residual_multiplier", 1) != 1,
    }
    return [name for name, differs in unlike.items() if differs]


def _rotates_otherwise(attention: nn.Module) -> bool:
    """Whether an attention rotates pairs of neighbours (ERNIE 4.5, Helium), or a part of each head only."""
    rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    neighbours = rotate_half is not None and rotate_half(torch.arange(4.0)).tolist() != [-2, -3, 0, 1]
    given = rope_settings(getattr(attention, "config", None))
    return neighbours or any(rope.get("partial_rotary_factor", 1) != 1 for rope in given)


def scaled_rotation(layer: nn.Module) -> list[str]:
    """The types of rotary positions that a target's layer has and this block has not: llama3, linear, yarn …"""
    given = rope_settings(getattr(layer.self_attn, "config", None))
    return sorted({rope.get("rope_type", "default") for rope in given} - {"default"})


class Norm(nn.RMSNorm):
    """RMSNorm in the type of its states: torch has no kernel for weights of another, as in autocast."""

    def forward(self, states: Tensor) -> Tensor:
        """The states `[..., H]`, normed."""
        return F.rms_norm(states, self.normalized_shape, self.weight.to(states.dtype), self.eps)


class DecoderBlock(nn.Module):
    """One pre-norm decoder block of the target's shape; output projections start at zero, so it starts as identity."""

    def __init__(self, config: HeadConfig, reads_tokens: bool = False) -> None:
        """reads_tokens: its projections read a token's embedding beside each state, behind a norm of its own."""
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, size
        self.rope_theta = config.rope_theta
        self.attention_norm = Norm(hidden, eps=config.rms_norm_eps)
        if reads_tokens:
            self.token_norm = Norm(hidden, eps=config.rms_norm_eps)
        read = 2 * hidden if reads_tokens else hidden
        self.q_proj = nn.Linear(read, self.heads * size, bias=False)
        self.k_proj = nn.Linear(read, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(read, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.mlp_norm = Norm(hidden, eps=config.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.up_proj):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        self.start_as_identity()

    def start_as_identity(self) -> None:
        """Make the block return its input, by output projections of zeros."""
        for projection in (self.o_proj, self.down_proj):
            nn.init.zeros_(projection.weight)

    def differs_from(self, layer: nn.Module) -> list[str]:
        """Names of what this block and a decoder layer of a target do not have in common, or do not do alike.

        Quantised weights are not alike; layers with Llama's weights may have other norms, activations or scales.
        """
        given, wanted = dict(layer.named_parameters()), dict(self.named_parameters())
        ours = {f"{theirs}.weight": wanted[f"{name}.weight"] for theirs, name in LLAMA_NAMES.items()}
        shared = ours.keys() & given.keys()
        unlike = {
            name for name in shared if ours[name].shape != given[name].shape or type(given[name].data) is not Tensor
        }
        return sorted(ours.keys() ^ given.keys() | unlike) or _unlike_llama(layer, self.head_dim)

    def copy_from(self, layer: nn.Module) -> None:
        """Take over the weights of a decoder layer from which this block does not differ."""
        given = dict(layer.named_parameters())
        self.load_state_dict({f"{name}.weight": given[f"{theirs}.weight"] for theirs, name in LLAMA_NAMES.items()})

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def rotation(self, positions: Tensor) -> Rotation:
        """Of positions `[B, L]`, for this block's queries and keys."""
        return rotary(positions, self.head_dim, self.rope_theta, self.q_proj.weight.dtype)

    def _read(self, states: Tensor, tokens: Tensor | None) -> Tensor:
        """What the projections read."""
        normed = self.attention_norm(states)
        return normed if tokens is None else torch.cat([self.token_norm(tokens), normed], dim=-1)

    def _project(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys side by side `[B, Q, (N+G)·D]`, and values `[B, Q, G·D]`."""
        return torch.cat([self.q_proj(read), self.k_proj(read)], dim=-1), self.v_proj(read)

    def _gate_and_up(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The two factors of SwiGLU, `[B, Q, I]` each."""
        return self.gate_proj(normed), self.up_proj(normed)

    def context_keys_values(
        self, states: Tensor, rotation: Rotation, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, G, C, D]` of context states `[B, C, H]` at positions with this `rotation`."""
        read = self._read(states, tokens)
        keys = rotate(self._split(self.k_proj(read), self.kv_heads), rotation)
        return keys, self._split(self.v_proj(read), self.kv_heads)

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend, tokens: Tensor | None = None) -> Tensor:
        """States `[B, Q, H]` at positions with this `rotation`, with `tokens [B, Q, H]` beside them → `[B, Q, H]`."""
        queries_keys, values = self._project(self._read(states, tokens))
        rotated = rotate(self._split(queries_keys, self.heads + self.kv_heads), rotation)
        queries, keys = rotated.split([self.heads, self.kv_heads], dim=1)
        attended = attend(queries, keys, self._split(values, self.kv_heads))
        states = states + self.o_proj(attended.transpose(1, 2).flatten(2))
        gate, up = self._gate_and_up(self.mlp_norm(states))
        return states + self.down_proj(F.silu(gate) * up)


class ResidualLayer(nn.Module):
    """x + SiLU(Wx + b) on the last dimension; W and b start at zero, so it starts as identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def grouped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention with fewer key/value heads than query heads; `mask` broadcasts to [B, N, Q, C].
    scale: of the scores, None for 1 / √D.

    With a mask, CUDA has grouped heads in its math kernel only, which writes all scores: there the keys are repeated.
    """
    if mask is not None and queries.is_cuda and queries.shape[1] != keys.shape[1]:
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
    )


def folded_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The same for a few queries `[B, N, Q, D]`, whose heads all see the `[B, 1, Q, C]` of `mask`; no key is copied.

    The queries of the N/G heads that share a key head are taken as rows of one head; `mask` may be given as
    `[B, N/G, Q, C]`, written out for them.
    """
    heads, shared = queries.shape[1], keys.shape[1]
    folded = queries.unflatten(1, (shared, -1)).flatten(2, 3)
    mask = mask.expand(-1, heads // shared, -1, -1).flatten(1, 2)[:, None]
    attended = grouped_attention(folded, keys, values, mask)
    return attended.unflatten(2, (heads // shared, -1)).flatten(1, 2)
