"""The frozen target: any decoder-only transformers model, with the masks of a tree or of packed rows put into it.

Shapes: B batch, L length, R rows of a forward (row 0 = base token), n committed tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draft_heads.configs.options import dtype_from_name, explain_out_of_memory
from draft_heads.data.fingerprint import target_fingerprint, weights_hashes
from draft_heads.data.generation_config import check_settings, configured_ends
from draft_heads.data.text.end_tokens import end_token_ids
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.data.text.thoughts import opens_thought
from draft_heads.data.text.token_spans import PLAIN, AnswerForm, answer_tokens
from draft_heads.inference.target import labels, sharded, views
from draft_heads.inference.target.architecture import Architecture, check_decoder_only
from draft_heads.inference.target.fused_decoder import FusedDecoder
from draft_heads.inference.target.kv_cache import KVCache, PerLayerKVCache
from draft_heads.inference.target.linear import half_precision_product
from draft_heads.inference.target.loading import LESS_MEMORY, load_model, target_config, target_tokenizer
from draft_heads.inference.target.module_decoder import ModuleDecoder
from draft_heads.inference.target.probe import logits_rules, probe
from draft_heads.inference.target.tree_attention import masks_by_layer_type, visible_keys
from draft_heads.inference.target.weights import WeightsSeen, look_again, merge_weights

logger = logging.getLogger(__name__)

TARGET_OF: WeakValueDictionary[int, Target] = WeakValueDictionary()
"""The id of a transformers model → the newest target that wraps it."""

TRYING = threading.RLock()
"""Held while a model is tried, under other settings than its own: no other thread may run it meanwhile."""


def _use_exact_kernels(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Settings of torch, on a GPU for the whole process, under which sums are not rounded on the way."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every size of tree and text
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product of experts has no float64


class TargetOutput(NamedTuple):
    """What a forward gives.

    hidden      [..., H], what the LM head reads
    logits      [..., V]
    aux_hidden  [..., k·H], the outputs of the k target layers asked for, side by side; None for none
    """

    hidden: Tensor
    logits: Tensor
    aux_hidden: Tensor | None = None


class Target:
    """Wraps a causal LM in evaluation mode; never trained, its parameters do not require gradients.

    It decodes, gives hidden states to training, lends its weights to heads (`inference.target.views`) and labels
    (`inference.target.labels`, for `data.labels.labeller.Labeller`).
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, name: str = "", adapter: str | None = None, runs: bool = True
    ) -> None:
        """Raises ValueError with one sentence for a model this engine cannot drive.

        A model that was loaded split among processes (`sharded.loading`) gets a whole embedding and LM head here.
        runs: whether forwards will be asked of it; if not, it is tried only where its config leaves open how it makes
        logits.
        """
        config = model.config
        check_decoder_only(config, name)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.chat_template: str | None = None  # as `from_pretrained` was given it
        self.name = name or getattr(config, "_name_or_path", "") or config.model_type
        self.runs = runs
        self.changes = 0  # how often the model was found to have other weights (`refresh`)
        self.attention = "auto"  # see `attend`
        self._drafted_below = 0  # 0: all rows of the LM head are chosen from
        self._whole: tuple[Target, Collection[int]] | None = None  # of a target without some of its layers
        self._take_parts()
        self._ends = configured_ends(model, self.config)
        self._check_placed()
        _use_exact_kernels(model, self.device, self.dtype)
        if self.split:
            sharded.gather_in_forward(self.decoder, len(self.layer_types), self.dtype)
        self._try_out()
        self.seen = None if self.split or not runs else WeightsSeen(model)
        TARGET_OF[id(model)] = self  # whole

    def _take_parts(self) -> None:
        """The decoder, embedding and LM head, the last two whole where the model is split among processes."""
        model = self.model
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = model.get_decoder()
        self.embedding = model.get_input_embeddings()
        self.split = any(sharded.is_split(p) for p in self.embedding.parameters())
        if self.split:
            self.embedding = sharded.whole_copy(self.embedding)
            model.set_output_embeddings(sharded.whole_copy(model.get_output_embeddings()))
        self.lm_head = model.get_output_embeddings()
        if self.lm_head is None:
            raise ValueError(f"the target must have an LM head; {self.name} has none; pick another target")
        self.architecture = Architecture.of(self.config, self.decoder, self.name)
        self.layer_types, self.window = self.architecture.layer_types, self.architecture.window
        self.modules = ModuleDecoder(self.decoder, self.config, self.architecture, self.dtype)

    def _try_out(self) -> None:
        """Probe the modules: how they make logits, and whether a fused decoder may take their place."""
        self._fused: FusedDecoder | None = None
        self.modules_only = True  # the probe asks the modules
        rules = set(logits_rules(self.config))
        with TRYING:
            self.rule, self.one_size = probe(self) if self.runs or len(rules) > 1 else (rules.pop(), False)
        self.modules_only = self.split or not (self.one_size and FusedDecoder.can_drive(self.model))

    def _check_placed(self) -> None:
        """Note the device of each layer; ValueError for one that lies on none."""
        weights = (next(layer.parameters(), self.embedding.weight) for layer in self.modules.layers or ())
        self.layer_devices = [weight.device for weight in weights]
        others = [p.device for module in (self.decoder, self.lm_head) for p in module.parameters()]
        if self.device.type != "meta" and any(device.type == "meta" for device in others):
            raise ValueError(
                f"every layer of the target must lie on a device; {self.name} has some offloaded; use more devices, a "
                "smaller dtype, or another target"
            )

    def refresh(self) -> None:
        """Notice what happened to the model's weights since they were merged; whoever begins an answer calls it.

        ValueError for dropout, and for changes that what was made for the old weights cannot follow.
        """
        if self._whole is not None:
            whole, skipped = self._whole
            if self.changes != whole.changes:
                self.__dict__.update(whole.without_layers(skipped).__dict__)
            return
        if self._ends != (ends := configured_ends(self.model, self.config)):
            self._ends = ends
            for cached in ("end_token_ids", "renderer", "answer_form"):
                self.__dict__.pop(cached, None)
        with TRYING:
            look_again(self)

    @property
    def fused(self) -> FusedDecoder | None:
        """The fast forward of Llama-like decoders, made when first decoding; None where the modules must do.

        It is probed as the modules were; where it answers differently it is not used.
        """
        with TRYING:  # also of a merge in another thread, which may say that the modules must do
            if self._fused is None and not self.modules_only:
                merge_weights(self)
            return None if self.modules_only else self._fused

    @property
    def forward_kind(self) -> str:
        """What decodes: "fused" or "modules", as reports name it."""
        return "fused" if self.fused is not None else "modules"

    def without_layers(self, skipped: Collection[int]) -> Target:
        """A target of the layers that are left, sharing their weights; ValueError where the modules must do."""
        whole = self._needs_fused("self_speculative")
        rest = copy(self)
        rest._fused = whole.without_layers(skipped)
        rest.layer_types = [layer.layer_type for layer in rest._fused.layers]
        rest._whole = self, skipped
        return rest

    def attend(self, path: str) -> None:
        """How tree rows attend, a name of `TREE_ATTENTION`; ValueError where the modules must do."""
        self._needs_fused("attention").attention = self.attention = path

    def _needs_fused(self, option: str) -> FusedDecoder:
        if self.fused is None:
            raise ValueError(
                f"{option} needs a target that the fused forward serves (docs/targets.md), unquantised, on one device; "
                f"{self.name} ({self.config.model_type}) runs through its modules; leave it out"
            )
        return self.fused

    @classmethod
    @explain_out_of_memory("loading the target", lambda: LESS_MEMORY)
    def from_pretrained(
        cls,
        path: str,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        adapter: str | None = None,
        chat_template: str | None = None,
        split: bool = False,
        lend_to: torch.device | None = None,
        drafts: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Target:
        """Load a local folder or hub id; ValueError for what cannot be a target.

        dtype          or its name; by default float32 on a CPU, the checkpoint's own on a GPU
        device         "auto" spreads the layers over all devices
        adapter        a PEFT adapter to merge into the target
        chat_template  a bundled name or a .jinja file, instead of the adapter's or else the tokenizer's `own`, with
                       settings if any (`own,enable_thinking=false`)
        split          the weights are split among the processes of the run (`inference.target.sharded`)
        lend_to        only embedding and LM head go to this device; the rest is not run and stays in its files
        drafts         it drafts for another target by its logits alone: its generation settings are ignored
        tokenizer      what `target_tokenizer` has loaded already
        """
        if not isinstance(dtype, torch.dtype):
            dtype = dtype_from_name("--dtype", dtype)
        spread = device == "auto" and lend_to is None
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = lend_to or torch.device(default if not device or device == "auto" else device)
        config = target_config(path)
        tokenizer = tokenizer or target_tokenizer(path, chat_template, adapter)
        model, hashes = load_model(path, config, dtype, device, adapter, spread, split, mapped=lend_to is not None)
        target = cls(model, tokenizer, path, adapter, runs=lend_to is None)
        target.chat_template = chat_template
        if lend_to:
            lent_in = dtype or (torch.float32 if lend_to.type == "cpu" else None)
            target.embedding.to(lend_to, lent_in)
            target.lm_head.to(lend_to, lent_in)
        if hashes:
            target._weights_hashes = hashes
        if target.runs and not drafts:
            check_settings(model, path)
        return target

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of states and logits; quantised weights may have another."""
        return self.embedding.weight.dtype

    @property
    def max_positions(self) -> int:
        """How many tokens fit, prompt and answer together."""
        return self.architecture.max_positions

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head, which may be more than the tokenizer has entries."""
        return self._drafted_below or int(self.config.vocab_size)

    def draft_only_below(self, token: int) -> None:
        """Choose tokens below this one only: those that the target has for which this model drafts."""
        self._drafted_below = min(token, self.vocab_size)

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, in labels and in decoding: `data.text.rendering.end_token_ids`."""
        return end_token_ids(self.tokenizer, self._ends)

    def answer_text(self, tokens: list[int]) -> str:
        """The text of an answer as later turns have it: stripped, of one in several channels (gpt-oss) the last."""
        shown = answer_tokens(tokens, self.end_token_ids, self.answer_form)
        return str(self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)).strip()

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that opens an answer's thought."""
        return opens_thought(self.tokenizer.decode(list(prompt[-32:])))

    @cached_property
    def answer_form(self) -> AnswerForm:
        """The tokens that the chat template puts around an answer, if they are known."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            return PLAIN
        try:
            return self.renderer.form
        except ValueError as error:
            logger.warning("answers are shown whole: %s", error)
            return PLAIN

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Renders with the tokenizer's chat template; ValueError without one."""
        return ChatRenderer(self.tokenizer, self.end_token_ids)

    def fingerprint(self) -> dict[str, Any]:
        """What must agree between a target and the heads and datasets made for it."""
        return target_fingerprint(self.config, self.tokenizer, self._weights_hashes)

    @cached_property
    def _weights_hashes(self) -> dict[str, str]:
        return weights_hashes(self.decoder, self.lm_head, whole=sharded.whole)

    # what draft heads and labels need
    view, drafting_view, whole_layers, label = views.view, views.drafting_view, views.whole_layers, labels.label

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """A cache with room for `capacity` rows of each of `batch` sequences."""
        if any(device != self.device for device in self.layer_devices) or not self.one_size:
            return self.per_layer_cache(capacity, batch)
        return KVCache(len(self.layer_types), capacity, batch, self.device)

    def per_layer_cache(self, capacity: int, batch: int = 1) -> PerLayerKVCache:
        """A cache for layers of any sizes, each on its device."""
        devices = self.layer_devices or [self.device] * len(self.layer_types)
        return PerLayerKVCache(devices, capacity, batch, self.device)

    def check_layers(self, target_layers: Sequence[int]) -> None:
        """ValueError unless heads can read these layers: layer k's output is `hidden_states[k]` in transformers."""
        self.modules.check_layers(target_layers, self.name)

    def _forward(
        self, token_ids: Tensor, depths: Tensor, sees: Tensor, cache: KVCache, target_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden and aux_hidden of R rows that see the whole cached text, and each other as `sees [B, R, R]` says."""
        if self.fused is not None:
            return self.fused(token_ids, depths, sees, cache, target_layers)
        positions = depths + cache.lengths[:, None]
        visible, keys = visible_keys(sees, positions, cache.lengths, cache.set_visible_length(sees.shape[1]))
        masks = masks_by_layer_type(visible, positions, keys, self.window, self.layer_types)
        return self.modules(token_ids, positions, masks, cache, target_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., V], the model's own: LM head, scale and cap; of half precision in float32 on a GPU, since
        rounding to half precision makes the best two equal every few hundred tokens.

        The cap cannot be left out of greedy choices: where it saturates, logits tie that differ without it.
        """
        product = half_precision_product(self.lm_head, hidden)
        if product is None:
            product = self.fused.logits(hidden) if self.fused is not None else self.lm_head(hidden)
        return self.rule(product[..., : self._drafted_below] if self._drafted_below else product)

    def forward_tree(
        self, token_ids: Tensor, depths: Tensor, sees: Tensor, cache: KVCache, target_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """One forward over R rows after each of B cached texts, written to `cache` but not committed: `[B, R, …]`.

        token_ids [B, R] int64; depths [B, R] int64, distance from the first row in the text; sees [B, R, R] bool, which
        rows each row sees beside the whole cached text; target_layers: those whose outputs are wanted (`check_layers`).
        """
        hidden, aux_hidden = self._forward(token_ids, depths, sees, cache, target_layers)
        return TargetOutput(hidden, self.logits(hidden).to(self.device), aux_hidden)

    def prefill(
        self, prompt: Tensor, cache: KVCache, target_layers: Sequence[int] = (), rows_per_forward: int = 2048
    ) -> TargetOutput:
        """Commit a prompt `[n]`: its states `[n, …]`, and the logits `[V]` of what follows."""
        pieces = []
        for chunk in prompt.split(rows_per_forward):
            index = torch.arange(chunk.numel(), device=prompt.device)
            causal = index <= index[:, None]
            pieces.append(self._forward(chunk[None], index[None], causal[None], cache, target_layers))
            cache.keep_first(chunk.numel())
        hidden = torch.cat([states[0] for states, _ in pieces])
        aux_hidden = torch.cat([aux[0] for _, aux in pieces if aux is not None]) if target_layers else None
        return TargetOutput(hidden, self.logits(hidden[-1]).to(self.device), aux_hidden)

    @torch.no_grad()
    def forward_rows(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, target_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden `[B, L, H]` and aux_hidden `[B, L, k·H]` of whole rows; a token sees its own conversation only.

        One conversation per row, padded on the right, needs no mask but the causal one, which flash attention has built
        in; states at padding are meaningless.
        """
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        with TRYING:
            if int(segment_ids.max()) <= 1:
                return self.modules(input_ids, index.expand_as(input_ids), target_layers=target_layers)
            visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (index[None, :] <= index[:, None])
            masks = masks_by_layer_type(visible, position_ids, position_ids, self.window, self.layer_types)
            return self.modules(input_ids, position_ids, masks, target_layers=target_layers)

    def states_of(self, batch: dict[str, Tensor], target_layers: Sequence[int] = ()) -> dict[str, Tensor]:
        """A training batch's `hidden [B, L, H]` and `aux_hidden [B, L, k·H]`, cached or computed now."""
        if "hidden" in batch:
            return {name: batch[name] for name in ("hidden", "aux_hidden") if name in batch}
        rows = batch["input_ids"], batch["segment_ids"], batch["position_ids"]
        hidden, aux_hidden = self.forward_rows(*rows, target_layers)
        return {"hidden": hidden} if aux_hidden is None else {"hidden": hidden, "aux_hidden": aux_hidden}
