"""A target's labels of texts: its own tokens in the assistant's turns, and its hidden states, from one forward.

In an assistant's turn it is the token that decoding would write there: chosen from logits that the checkpoint's own
processors have changed (`data.generation_config`), if it asks for any.

Shapes: B rows, L length, N tokens of all rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draft_heads.data.generation_config import own_processors, process_logits
from draft_heads.data.labels.labeller import Labelled
from draft_heads.inference.target.linear import half_precision_product

Target = Any  # a `target.Target`, whose module imports this one

_LOGIT_ROWS = 4096  # logits of so many positions exist at once: 4096 × 128k × 4 B = 2 GiB


@torch.inference_mode()
def label(
    target: Target,
    rows: list[list[int]],
    keep_hidden: bool,
    target_layers: Sequence[int] = (),
    masks: Sequence[Sequence[bool]] | None = None,
) -> list[Labelled]:
    """See `data.labels.labeller.Labeller`."""
    lengths = [len(row) for row in rows]
    labelled_at = [[True] * length for length in lengths] if masks is None else masks
    # padding is masked: any token will do that has a row in the embedding, as a tokenizer's own may not
    ids_BL = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=0)
    ids, device = ids_BL.to(target.device), target.device
    positions = torch.arange(max(lengths), device=device).expand_as(ids)  # padding on the right is not seen
    hidden_BLH, aux_BLK = target.forward_rows(ids, torch.ones_like(ids), positions, target_layers)
    for number, (row, finite_L) in enumerate(zip(rows, hidden_BLH.isfinite().all(-1).cpu())):
        if not finite_L[: len(row)].all():
            raise Overflow(target, row, number)
    wanted_BL = pad_sequence([torch.tensor([*mask[1:], False]) for mask in labelled_at], batch_first=True)
    hidden_NH = hidden_BLH[wanted_BL.to(device)]
    chosen_N = torch.cat([own_logits(target, part).argmax(-1) for part in hidden_NH.split(_LOGIT_ROWS)]).cpu()
    greedy_BL = torch.full_like(ids_BL, -100)
    greedy_BL[:, 1:][wanted_BL[:, :-1]] = chosen_N
    aux_BLK = hidden_BLH[..., :0] if aux_BLK is None else aux_BLK
    labelled = []
    shown = masks or [()] * len(rows)
    for hidden_LH, aux_LK, chosen_L, row, mask in zip(hidden_BLH, aux_BLK, greedy_BL, rows, shown, strict=True):
        greedy = chosen_L[: len(row)].tolist()
        for start, end in turns(mask):
            greedy[start:end] = processed_choices(target, row, hidden_LH, start, end) or greedy[start:end]
        hidden, aux_hidden = (x[: len(row)].cpu() if keep_hidden else None for x in (hidden_LH, aux_LK))
        labelled.append(Labelled(greedy, hidden, aux_hidden))
    return labelled


class Overflow(ValueError):
    """For a text of which a state is no number: then its logits are none, and token 0 would be chosen there.

    row: its place among the rows that were to be labelled, where it is one of several
    """

    def __init__(self, target: Target, ids: Sequence[int], row: int | None = None) -> None:
        self.row = row
        dtype = str(target.dtype).removeprefix("torch.")
        super().__init__(
            f"the target's states must be finite; in {dtype} some of the text that begins with the tokens "
            f"{list(ids[:8])} are not; take --dtype bfloat16 or float32 (in training --target_dtype), or leave the "
            "text out"
        )


def not_finite(target: Target, hidden: Tensor) -> Tensor | None:
    """[B] bool, whether some of the states `[B, n, H]` of each text are no numbers. In float16, whose largest number is
    65,504; None for other types, in which no target's states are so large."""
    return ~hidden.isfinite().flatten(1).all(1) if target.dtype == torch.float16 else None


def own_logits(target: Target, hidden: Tensor) -> Tensor:
    """[N, H] → [N, V], the model's own, through its own modules."""
    product = half_precision_product(target.lm_head, hidden)
    logits: Tensor = target.rule(target.lm_head(hidden) if product is None else product)
    return logits


def turns(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(start, end) of every run of true values, without the first token. (1, 1, 0, 1, 1) → (1, 2), (3, 5)."""
    place = 0
    for trained, run in groupby(mask):
        start, place = place, place + len(list(run))
        if trained and place > max(start, 1):
            yield max(start, 1), place


def processed_choices(target: Target, row: list[int], hidden_LH: Tensor, start: int, end: int) -> list[int]:
    """The tokens of `row[start:end]` that decoding would choose there after the text before; [] without processors."""
    processors = own_processors(target, row[:start], target.max_positions - start)
    if processors is None:
        return []
    ids_1L, chosen = torch.tensor([row], device=target.device), []
    for first in range(start, end, _LOGIT_ROWS):
        logits_NV = own_logits(target, hidden_LH[first - 1 : min(first + _LOGIT_ROWS, end) - 1]).to(target.device)
        for place, logits_V in enumerate(logits_NV, start=first):
            chosen.append(process_logits(processors, ids_1L[:, :place], logits_V[None]).argmax(-1))
    tokens: list[int] = torch.cat(chosen).tolist()
    return tokens
