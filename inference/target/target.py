"""The frozen target: any decoder-only transformers model, with the masks of a tree or of packed rows put into it.

Shapes: B batch, L length, R rows of a forward (row 0 = base token), n committed tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draft_heads.data.fingerprint import target_fingerprint
from draft_heads.heads.base import DraftHead, TargetView
from draft_heads.inference.target.fused_decoder import FAMILY, FusedDecoder
from draft_heads.inference.target.kv_cache import KVCache, ShardedKVCache
from draft_heads.inference.target.linear import DraftingView
from draft_heads.inference.target.masks import behind_text, masks_by_layer_type


class Target:
    """Wraps a causal LM in evaluation mode; never trained, its parameters do not require gradients."""

    def __init__(self, model: Any, tokenizer: Any = None, name: str = "") -> None:
        """Raises ValueError with one sentence for a model this engine cannot drive."""
        config = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"the target must be a decoder-only causal LM; {name or config.model_type} is an encoder-decoder "
                "model; pick another --target"
            )
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or getattr(config, "_name_or_path", "") or config.model_type
        self.config = config.get_text_config(decoder=True)
        self.decoder = model.get_decoder()
        self.embedding = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self.window: int | None = getattr(self.config, "sliding_window", None)
        layer_types = set(getattr(self.config, "layer_types", None) or ())
        self._per_layer_type = "sliding_attention" in layer_types
        if not layer_types and getattr(self.config, "use_sliding_window", True) is False:
            self.window = None
        if layer_types and not self._per_layer_type:
            self.window = None
        unknown = layer_types - {"full_attention", "sliding_attention"}
        if unknown or self.lm_head is None:
            reason = f"layers of type {', '.join(sorted(unknown))}" if unknown else "no LM head"
            raise ValueError(
                f"the target must be a decoder with full or sliding-window attention and an LM head; {self.name} has "
                f"{reason}; pick another --target"
            )
        self.layer_types = self._layer_types()
        layers = getattr(self.decoder, "layers", None)
        self.layer_devices = [next(x.parameters()).device for x in layers or ()]
        if any(device.type == "meta" for device in self.layer_devices):
            raise ValueError(
                f"every layer of the target must lie on a device; {self.name} has some offloaded; use more devices, a "
                "smaller --dtype, or another --target"
            )
        self._check_masks()
        self.compiled = False
        self._fused: FusedDecoder | None = None
        self._modules_only = not FusedDecoder.can_drive(model)

    @property
    def fused(self) -> FusedDecoder | None:
        """The fast forward of Llama-like decoders, made when first decoding; None where the modules must do."""
        if self._fused is None and not self._modules_only:
            self._fused = FusedDecoder(self.model, self.layer_types, self.window)
        return self._fused

    def compile(self) -> None:
        """Engines made from now on decode through compiled programs; ValueError where the modules must do."""
        self._check_compilable(self._needs_fused("--compile").attention)
        self.compiled = True

    def without_layers(self, skipped: Collection[int]) -> Target:
        """A target of the layers that are left, sharing their weights; ValueError where the modules must do."""
        whole = self._needs_fused("self_speculative")
        left = copy(self)
        left._fused = whole.without_layers(skipped)
        left.layer_types = [layer.layer_type for layer in left._fused.layers]
        return left

    def attend(self, path: str) -> None:
        """How tree rows attend, a name of `TREE_ATTENTION`; ValueError where the modules must do."""
        fused = self._needs_fused("--attention")
        if self.compiled:
            self._check_compilable(path)
        fused.attention = path

    @staticmethod
    def _check_compilable(path: str) -> None:
        if path == "flex":
            raise ValueError("--compile works with --attention masked; got flex; leave one of them out")

    def _needs_fused(self, flag: str) -> FusedDecoder:
        if self.fused is None:
            raise ValueError(
                f"{flag} needs a target of {', '.join(FAMILY)} on one device, unquantised; {self.name} is of "
                f"{self.config.model_type}; leave it out"
            )
        return self.fused

    def _layer_types(self) -> list[str]:
        """What each layer sees: full_attention or sliding_attention."""
        if self._per_layer_type:
            return list(self.config.layer_types)
        return ["full_attention" if self.window is None else "sliding_attention"] * self.config.num_hidden_layers

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        adapter: str | None = None,
        chat_template: str | None = None,
    ) -> Target:
        """Load a local folder or hub id.

        dtype defaults to float32 on CPU and to the checkpoint's own on GPU; `device` "auto" spreads the layers over all
        devices; `adapter` names a PEFT adapter that is merged into the target; `chat_template` is a .jinja file laid
        over the tokenizer (older Vicunas have none).
        """
        sharded = device == "auto"
        device = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if sharded or not device
            else torch.device(device)
        )
        config = AutoConfig.from_pretrained(path)
        if config.is_encoder_decoder:
            raise ValueError(
                f"--target {path} must be a decoder-only causal LM; it is an encoder-decoder model "
                f"({config.model_type}); pick another --target"
            )
        chosen = dtype or (torch.float32 if device.type == "cpu" else "auto")
        placed: dict[str, Any] = {"device_map": "auto"} if sharded else {}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=chosen, attn_implementation="sdpa", **placed)
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        tokenizer = AutoTokenizer.from_pretrained(path)
        if chat_template:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        if not sharded:
            model.to(device)  # type: ignore[arg-type]
        return cls(model, tokenizer, name=path)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def max_positions(self) -> int:
        """How many tokens fit, prompt and answer together."""
        return int(getattr(self.config, "max_position_embeddings", 2**31))

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head, which may be more than the tokenizer has entries."""
        return int(self.config.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, from the generation config."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.config.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def fingerprint(self) -> dict[str, Any]:
        """What must agree between a target and the heads and datasets made for it."""
        return target_fingerprint(self.config, self.tokenizer)

    def view(self) -> TargetView:
        """The embedding and LM head, lent to a draft head."""
        layers = getattr(self.decoder, "layers", None)
        return TargetView(
            self.embedding,
            self.lm_head.weight,
            getattr(self.lm_head, "bias", None),
            layers if isinstance(layers, torch.nn.ModuleList) else None,
        )

    def drafting_view(self, head: DraftHead) -> TargetView:
        """The same with the rows of the head's draft vocabulary, its logits fast for a few rows."""
        view = head.draft_view(self.view())
        if view.lm_head_weight is not self.lm_head.weight:
            return DraftingView.of(view)
        return view if self.fused is None else DraftingView.of(view, self.fused.logits)

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """A cache with room for `capacity` rows of each of `batch` sequences."""
        if len(set(self.layer_devices)) > 1:
            return ShardedKVCache(self.layer_devices, capacity, self.device)
        return KVCache(len(self.layer_types), capacity, batch, self.device)

    def _through_modules(self, token_ids: Tensor, positions: Tensor, masks: dict[str, Tensor], cache: Any) -> Tensor:
        """[B, R, H] by transformers' own decoder."""
        as_taken = {kind: mask[:, None] for kind, mask in masks.items()}
        positions = positions.clamp(max=self.max_positions - 1)  # drafts may hang over the end; none is accepted there
        mask: Any = as_taken if self._per_layer_type else next(iter(as_taken.values()))
        return self.decoder(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def _forward(self, token_ids: Tensor, depths: Tensor, sees: Tensor, cache: KVCache) -> Tensor:
        """Hidden `[R, H]` of R rows that see the whole cached text, and each other as `sees [R, R]` says."""
        if self.fused is not None:
            return self.fused(token_ids[None], depths[None], sees[None], cache)[0]
        positions = depths + cache.lengths[:, None]
        visible, keys = behind_text(sees[None], positions, cache.lengths, cache.set_visible_length(len(sees)))
        masks = masks_by_layer_type(visible, positions, keys, self.window, self.layer_types)
        return self._through_modules(token_ids[None], positions, masks, cache)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., V], the target's LM head."""
        return self.fused.logits(hidden) if self.fused is not None else self.lm_head(hidden)

    def forward_tree(self, token_ids: Tensor, depths: Tensor, sees: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """One forward over R rows behind the cached text: hidden `[R, H]` and logits `[R, V]`.

        token_ids [R] int64; depths [R] int64, distance from the first row in the text; sees [R, R] bool, which rows
        each row sees. Every row sees the whole cached text. Rows are written to `cache` but not committed.
        """
        hidden = self._forward(token_ids, depths, sees, cache)
        return hidden.to(self.device), self.logits(hidden).to(self.device)  # a sharded target's lie elsewhere

    def prefill(self, prompt: Tensor, cache: KVCache, rows_per_forward: int = 2048) -> tuple[Tensor, Tensor]:
        """Commit a prompt `[n]`: its hidden states `[n, H]` and the logits `[V]` of what follows."""
        pieces = []
        for chunk in prompt.split(rows_per_forward):
            index = torch.arange(chunk.numel(), device=prompt.device)
            pieces.append(self._forward(chunk, index, index <= index[:, None], cache))
            cache.keep_first(chunk.numel())
        hidden = torch.cat(pieces)
        return hidden.to(self.device), self.logits(hidden[-1]).to(self.device)

    @torch.no_grad()
    def forward_rows(self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Hidden states `[B, L, H]` of whole (possibly packed) rows: a token sees its own conversation only."""
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (index[None, :] <= index[:, None])
        masks = masks_by_layer_type(visible, position_ids, position_ids, self.window, self.layer_types)
        return self._through_modules(input_ids, position_ids, masks, None)

    def hidden_of(self, batch: dict[str, Tensor]) -> Tensor:
        """[B, L, H] of a training batch: those cached with the labels, or `forward_rows` now."""
        if "hidden" in batch:
            return batch["hidden"]
        return self.forward_rows(batch["input_ids"], batch["segment_ids"], batch["position_ids"])

    @torch.no_grad()
    def _check_masks(self) -> None:
        """The model must take our masks and compute `logits = LM head(hidden)`: compared once with its own forward."""
        length = min(24, self.max_positions)
        ids = torch.arange(length, device=self.device)[None] % self.config.vocab_size
        rule = (
            f"the target must accept a 4-D attention mask and compute its logits by the LM head alone; {self.name} "
            f"({self.config.model_type})"
        )
        try:
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            positions = torch.arange(length, device=self.device)[None]
            hidden = self.forward_rows(ids, torch.ones_like(ids), positions)
            ours = self.lm_head(hidden).float()
        except Exception as error:
            raise ValueError(f"{rule} failed a trial forward ({error}); pick another --target") from error
        gap = (own - ours).abs().max()
        if gap > (1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1) * own.abs().max().clamp(min=1):
            raise ValueError(f"{rule} differs by {gap:.2g} (a scaled or capped LM head?); pick another --target")
