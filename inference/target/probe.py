"""What is tried when a target is loaded: whether a draft tree gives what the model's own forward gives on each path.

Shapes: L path length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import out_of_memory
from draft_heads.heads.target_view import LogitsRule
from draft_heads.inference.target.library_names import CACHE, is_recurrent, takes_cache
from draft_heads.inference.tree import ancestor_rows, depths

Target = Any  # a `target.Target`, whose module imports this one

_TEXT, _WINDOW = 24, 8  # committed tokens, and the window that they cross
_TEXTS = 3  # tried in half precision, where rounding may send a token of one of them to another expert
_PARENTS = (-1, -1, 0, 1)  # of the nodes: two siblings, a child each; rows are the base token and the nodes
_FIRST, _SECOND = (0, 1, 3), (0, 2, 4)  # rows of the two paths


def _unfit(target: Target) -> str | None:
    """Why the architecture cannot follow a tree, where that can be read from its signature and config."""
    taken = inspect.signature(target.decoder.forward).parameters
    if is_recurrent(target.model, target.config):
        return "keeps a recurrent state instead of keys and values, and a state cannot branch"
    if not takes_cache(target.decoder):
        return f"takes no cached keys and values (`{CACHE}`), after which a tree would stand"
    if getattr(target.config, "alibi", False) or "position_ids" not in taken:
        return "takes no position ids (as with ALiBi), so siblings of a tree cannot stand at one position"
    return None


@contextmanager
def _short_window(target: Target) -> Iterator[None]:
    """Sliding windows of `_WINDOW` tokens for a while: transformers reads the config whenever it makes masks."""
    holders = [(one, "window") for one in (target, target.fused) if one is not None]
    configs = {id(config): config for config in (target.config, target.decoder.config)}.values()
    holders += [(config, "sliding_window") for config in configs]  # also one that no layer seems to read
    longer = [(one, name, length) for one, name in holders if isinstance(length := getattr(one, name, None), int)]
    longer = [(one, name, length) for one, name, length in longer if length > _WINDOW]
    try:
        for one, name, _ in longer:
            setattr(one, name, _WINDOW)
        yield
    finally:
        for one, name, length in longer:
            setattr(one, name, length)


LOGITS_NUMBERS = ("logits_scaling", "logit_scale", "final_logit_softcapping")
"""What a config says of how logits are made of the LM head's product."""


def logits_rules(config: Any) -> Iterator[LogitsRule]:
    """Every rule that the numbers in a config can mean; models multiply or divide by a number of the same name."""
    scaling, scale, cap_of_config = (getattr(config, name, None) for name in LOGITS_NUMBERS)
    scaling, scale = scaling or 1.0, scale or 1.0
    for cap in {cap_of_config, None}:
        yield LogitsRule(scale, scaling, cap)
        yield LogitsRule(scale * scaling, 1.0, cap)
        yield LogitsRule(1.0, 1.0, cap)


def _gaps(ours: Tensor, own: Tensor) -> Tensor:
    """[...] from logits [..., V]: the size of their difference, relative to how much the model's own logits vary.

    On the CPU, wherever the layers lie.
    """
    own = own[..., : ours.shape[-1]]  # a draft model may choose among its first rows only
    ours, own = ours.double(), own.to(ours.device).double()
    return ((ours - own).square().mean(-1).sqrt() / own.std(-1).clamp(min=1e-30)).cpu()


@torch.no_grad()
def probe(target: Target) -> tuple[LogitsRule, bool]:
    """How the model makes logits of its LM head's product, and whether all layers' keys and values have one shape.

    A tree of two siblings with a child each stands after a cached text that crosses a (shortened) sliding window; its
    second path is committed and a token follows. Compared with one plain forward of the model over both paths. Raises
    ValueError with the reason for a model whose answers differ.
    """
    name = f"{target.name} ({target.config.model_type})"
    rule = f"the target must follow a draft tree as it follows plain text; {name}"
    if reason := _unfit(target):
        raise ValueError(f"{rule} {reason}; pick another target")
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.03}.get(target.dtype, 3e-4)
    exact = target.dtype in (torch.float32, torch.float64)
    try:
        with _short_window(target):
            found, uniform, rule_gap, gap = _compare_texts(target, exact)
    except FloatingPointError:
        dtype = str(target.dtype).removeprefix("torch.")
        remedy = (
            "take --dtype bfloat16 or float32 (in training --target_dtype)"
            if target.dtype == torch.float16
            else "copy it again"
        )
        raise ValueError(
            f"the target's logits must be numbers; those of {name} for a trial text are not, in {dtype}; {remedy}"
        ) from None
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = str(error) or type(error).__name__
        raise ValueError(f"{rule} failed a trial forward ({reason}); pick another target") from error
    if not rule_gap <= tolerance:
        raise ValueError(
            f"the target's logits must be its LM head's, scaled or capped as its config says; those of {name} differ "
            f"by {rule_gap:.2g} of their spread; pick another target"
        )
    if not gap <= tolerance:
        raise ValueError(f"{rule} answers with logits that differ by {gap:.2g} of their spread; pick another target")
    return found, uniform


def _compare_texts(target: Target, exact: bool) -> tuple[LogitsRule, bool, float, float]:
    """As `_compare`, with one gap: the largest of the rows' gaps, in half precision of their medians over three texts.

    Example: two rows differ by .4 .3 in the first text, by .01 .3 in the second and .01 .2 in the third: the gap is .3.
    """
    compared = [_compare(target, text, exact) for text in range(1 if exact else _TEXTS)]
    found, uniform, _, _ = compared[0]
    gaps = torch.stack([gaps for *_, gaps in compared])
    return found, uniform, max(rule_gap for _, _, rule_gap, _ in compared), float(gaps.median(0).values.max())


def _compare(target: Target, seed: int, exact: bool) -> tuple[LogitsRule, bool, float, Tensor]:
    """The best rule, whether layers have one shape, the gap of the rule, the gaps of tree rows and of packed rows;
    FloatingPointError for logits that are no numbers.

    Packed rows have one gap together: the largest if `exact`, else the median.
    """
    text = min(_TEXT, target.max_positions - 4)
    ids = (torch.arange(text + 6, device=target.device) * 7919 + 13 + 1009 * seed) % target.vocab_size
    prompt, rows, following = ids[:text], ids[text : text + 5], ids[text + 5 :]
    paths = torch.stack([torch.cat([prompt, rows[list(path)], following]) for path in (_FIRST, _SECOND)])  # [2, L]

    products: list[Tensor] = []
    thread = get_ident()  # others may run the model meanwhile
    hook = target.lm_head.register_forward_hook(
        lambda module, args, output: products.append(output) if get_ident() == thread else None
    )
    try:
        own = target.model(input_ids=paths, use_cache=False).logits
    finally:
        hook.remove()
    if own.isnan().any():
        raise FloatingPointError
    rules = {rule: float(_gaps(rule(products[0]), own).max()) for rule in logits_rules(target.config)}
    best = min(rules, key=lambda rule: rules[rule])
    target.rule = best

    fused = target.fused is not None
    cache = target.new_cache(text + 8) if fused else target.per_layer_cache(text + 8)
    sees = ancestor_rows(torch.tensor(_PARENTS, device=target.device), 5)
    last = target.prefill(prompt, cache).logits
    tree = target.forward_tree(rows[None], depths(sees)[None], sees[None], cache).logits[0]
    committed = torch.tensor([_SECOND], device=target.device)
    cache.commit(committed, committed.new_tensor([3]))
    cache.bound += 3
    one = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
    after = target.forward_tree(following[None], torch.zeros_like(following)[None], one, cache).logits[0]

    positions = torch.arange(text + 4, device=target.device).repeat(2)[None]
    segments = torch.tensor([1, 2], device=target.device).repeat_interleave(text + 4)[None]
    packed, _ = target.forward_rows(paths.view(1, -1), segments, positions)
    packed_gaps = _gaps(target.logits(packed), own.flatten(0, 1)[None])
    gaps = [
        _gaps(last[None], own[:1, text - 1]),
        _gaps(tree[list(_FIRST)], own[0, text : text + 3]),
        _gaps(tree[list(_SECOND)], own[1, text : text + 3]),
        _gaps(after, own[1, -1:]),
        (packed_gaps.max() if exact else packed_gaps.median())[None],
    ]
    if float(_gaps(own[1], own[0]).max()) == 0:
        raise ValueError("its logits do not depend on the text")
    return best, fused or cache.uniform, rules[best], torch.cat(gaps)
