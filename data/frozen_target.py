"""The frozen target as a labeller: its hidden states and its own greedy next tokens.

Shapes: B rows, L tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draft_heads.data.chat_template import load_tokenizer
from draft_heads.data.rendering import end_token_ids

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOGIT_ROWS = 4096  # logits of so many positions exist at once: 4096 × 128k × 4 B = 2 GiB


@dataclass
class FrozenTarget:
    """A causal LM whose `lm_head` reads the last hidden state of `decoder`; nothing of it is ever trained."""

    model: PreTrainedModel
    decoder: nn.Module
    lm_head: nn.Module
    tokenizer: PreTrainedTokenizerBase
    end_ids: list[int]
    max_positions: int | None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def pad_id(self) -> int:
        """What fills the padding; it is masked, so any id will do."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.end_ids[0])

    @torch.inference_mode()
    def label(self, rows: list[list[int]], keep_hidden: bool) -> list[tuple[list[int], Tensor | None]]:
        """(greedy_ids [L], hidden [L, H] on the CPU or None) per row, from one right-padded forward.

        `greedy_ids[i] = argmax LM(h_{i-1})`, what the target says at position i given the text before it; -100 at
        position 0. Example: ids [5, 7, 9] give [-100, argmax LM(h_0), argmax LM(h_1)].
        """
        length = max(map(len, rows))
        ids_BL = torch.full((len(rows), length), self.pad_id, dtype=torch.long)
        seen_BL = torch.zeros((len(rows), length), dtype=torch.long)
        for b, row in enumerate(rows):
            ids_BL[b, : len(row)] = torch.tensor(row)
            seen_BL[b, : len(row)] = 1
        seen_BL = seen_BL.to(self.device)
        hidden_BLH = self.hidden(ids_BL.to(self.device), seen_BL)
        real = seen_BL.bool()
        choice_N = self._choices(hidden_BLH[real])
        labelled: list[tuple[list[int], Tensor | None]] = []
        start = 0
        choices = choice_N.tolist()
        for b, row in enumerate(rows):
            greedy = [-100] + choices[start : start + len(row) - 1]
            start += len(row)
            labelled.append((greedy, hidden_BLH[b, : len(row)].cpu() if keep_hidden else None))
        return labelled

    def hidden(self, ids_BL: Tensor, seen_BL: Tensor) -> Tensor:
        """Hidden states [B, L, H] as the LM head reads them."""
        out = self.decoder(input_ids=ids_BL, attention_mask=seen_BL, use_cache=False)
        return out.last_hidden_state

    def _choices(self, hidden_NH: Tensor) -> Tensor:
        return torch.cat([self.lm_head(part).argmax(-1) for part in hidden_NH.split(_LOGIT_ROWS)])


def load_target(
    path: str,
    dtype: str | None = None,
    device: str | None = None,
    chat_template: str | None = None,
    adapter: str | None = None,
) -> FrozenTarget:
    """Load and check a target: float32 on the CPU and the checkpoint's own dtype on a GPU unless `dtype` says;
    `adapter` names a PEFT adapter that is merged into it.

    ValueError, in a sentence, for an encoder-decoder model, for one that is no causal LM, and for one whose logits
    are not plainly `lm_head(last hidden state)`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} is unknown; pass one of {', '.join(DTYPES)}")
    config = AutoConfig.from_pretrained(path)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"--target {path} is an encoder-decoder model ({config.model_type}); draft heads need a decoder-only "
            "causal LM"
        )
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision: torch.dtype | str = DTYPES[dtype] if dtype else ("auto" if place.type != "cpu" else torch.float32)
    tokenizer = load_tokenizer(path, chat_template)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=precision)
    except ValueError as error:
        raise ValueError(f"--target {path} ({config.model_type}) is no causal LM: {error}") from None
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model = model.to(place)  # type: ignore[arg-type]
    model.eval().requires_grad_(False)
    generation = getattr(model, "generation_config", None)
    ends = end_token_ids(tokenizer, getattr(generation, "eos_token_id", None))
    return wrap_target(model, tokenizer, ends)


def wrap_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_ids: list[int]) -> FrozenTarget:
    """Find the decoder and the LM head of `model` and check on two tokens that together they are the model."""
    name = type(model).__name__
    if not end_ids:
        raise ValueError(f"neither the tokenizer nor the config of {name} names an end-of-turn token; set eos_token")
    lm_head = model.get_output_embeddings()
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        decoder = model.base_model
    if lm_head is None or decoder is model:
        raise ValueError(f"{name} shows no separate decoder and LM head; it cannot be a target")
    config = model.config.get_text_config()
    target = FrozenTarget(
        model,
        decoder,
        lm_head,
        tokenizer,
        end_ids,
        getattr(config, "max_position_embeddings", None),
    )
    _check_split(target, name)
    return target


@torch.inference_mode()
def _check_split(target: FrozenTarget, name: str) -> None:
    ids = torch.tensor([[target.end_ids[0], target.pad_id]], device=target.device)
    seen = torch.ones_like(ids)
    ours = target.lm_head(target.hidden(ids, seen)).float()
    theirs = target.model(input_ids=ids, attention_mask=seen, use_cache=False).logits.float()
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"the logits of {name} are not lm_head(last hidden state): it scales or caps them, or reads another "
            "tensor; such targets are not supported"
        )
