"""Rows of transformers' own `generate` in an evaluation: plain, with its prompt lookup, or with a draft model.

transformers                                plain
hf_lookup=transformers,prompt_lookup=10     drafts of so many tokens from the text itself
hf_draft=transformers,assistant=DIR         drafts of a smaller model, as `generate(assistant_model=…)`
"""

from __future__ import annotations

import logging
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.utils import cached_file

from draft_heads.data.common.pretrained import MAY_BE_MISSING, load_config
from draft_heads.data.text.chat_template import PROBE_TEXT, load_tokenizer
from draft_heads.inference.drafters.registry import DrafterSpec
from draft_heads.inference.drafters.words import split_pairs
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS
from draft_heads.inference.evaluation.hf_generate import HFGenerate, hf_generate
from draft_heads.inference.generation import Clock, Generation, GenerationSettings, Stopper, room
from draft_heads.inference.target.loading import check_complete, readable
from draft_heads.inference.target.target import Target

logger = logging.getLogger(__name__)


def parse_hf_row(text: str) -> tuple[str, dict[str, str]] | None:
    """(name, options) of a row of `generate`; None for a drafter's words, ValueError for a wrong row."""
    name, equals, rest = text.partition("=")
    if text == TRANSFORMERS:
        return TRANSFORMERS, {}
    words, *pairs = rest.split(",") if equals and "," not in name else text.split(",")
    if words != TRANSFORMERS:
        return None
    options, plain = split_pairs(pairs, text), TRANSFORMERS in (name, text.partition(",")[0])
    if plain or len(options) != 1 or not options.keys() <= {"prompt_lookup", "assistant"}:
        raise ValueError(
            f"a row of generate is {TRANSFORMERS}, NAME={TRANSFORMERS},prompt_lookup=N or NAME={TRANSFORMERS},"
            f"assistant=DIR, under another name; got {text!r}; write e.g. hf_lookup={TRANSFORMERS},prompt_lookup=10"
        )
    try:
        DrafterSpec.parse(f"{name}=vanilla")  # its rules for names
    except ValueError as error:
        raise ValueError(str(error).replace(f"{name}=vanilla", text)) from None
    if (tokens := options.get("prompt_lookup")) is not None and not (tokens.isdecimal() and int(tokens)):
        raise ValueError(f"prompt_lookup is how many tokens are drafted, 1 or more; got {tokens!r}; write 10")
    return name, options


def hf_engine(target: Target, options: dict[str, str]) -> HFGenerate:
    """The engine of a row of `generate`; ValueError for an assistant that cannot draft for the target."""
    if tokens := options.get("prompt_lookup"):
        return HFAssisted(target, {"prompt_lookup_num_tokens": int(tokens)})
    if path := options.get("assistant"):
        load_config(path, "assistant")
        told: Any = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # `check_complete` judges
        with readable(path):
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype, **told)
        check_complete(path, *loaded)
        assistant = loaded[0].to(target.device).eval()
        if (own := assistant.config.get_text_config().vocab_size) != target.vocab_size:
            raise ValueError(
                f"an assistant has its target's vocabulary, of {target.vocab_size:,} tokens with its padding; {path} "
                f'has {own:,}; pass a smaller model whose config.json has "vocab_size": {target.vocab_size}'
            )
        _tell_of_its_tokenizer(path, target)
        return HFAssisted(target, {}, assistant)
    return HFGenerate(target)


def _tell_of_its_tokenizer(path: str, target: Target) -> None:
    """A line where an assistant's tokenizer writes as other tokens what the target's can write.

    Tokens that one of them lacks say nothing: reserved ones that were renamed, those that a later model added.
    """
    if target.tokenizer is None or cached_file(path, "tokenizer.json", **MAY_BE_MISSING) is None:
        return
    own = None
    with suppress(Exception):  # a damaged one, which `generate` does not read
        own = load_tokenizer(path, option="assistant")
    if own is None:
        return
    known, tokens = own.get_vocab(), target.tokenizer.get_vocab()
    others = sum(known[token] != tokens[token] for token in known.keys() & tokens.keys())
    ids, wanted = (list(one(PROBE_TEXT, add_special_tokens=False)["input_ids"]) for one in (own, target.tokenizer))
    if others or ids != wanted:
        logger.warning(
            "an assistant should have its target's tokenizer; that of %s %s: drafts may be other words, which are not "
            "accepted; a model of the target's family has the same",
            path,
            f"has other ids for {others:,} of the tokens that both have" if others else "splits text otherwise",
        )


class HFAssisted(HFGenerate):
    """`generate` with drafts of its own; β counts the target's forwards."""

    def __init__(self, target: Target, config: dict[str, Any], assistant: Any = None) -> None:
        """config: settings of the generation config; assistant: a model that drafts"""
        super().__init__(target)
        self._config, self._assistant = config, assistant
        self._assistants_own = None if assistant is None else deepcopy(assistant.generation_config)

    def generate(self, prompt_ids: list[int], settings: GenerationSettings) -> Generation:
        """As `HFGenerate.generate`; a step is a round of `generate`, whose parts are not timed apart."""
        stopper = Stopper(settings, self.target, room(self.target, len(prompt_ids), settings.max_new_tokens))
        answer, clock = Generation(), Clock()
        more = {}
        if self._assistant is not None:  # a schedule of generate's writes there how many drafts come next
            self._assistant.generation_config = deepcopy(self._assistants_own)
            more = {"assistant_model": self._assistant}
        rounds = _Rounds(stopper, answer, len(prompt_ids))
        counted = self.target.model.register_forward_pre_hook(rounds.forward_begins)
        try:
            hf_generate(self.target, prompt_ids, settings, stopper.limit, [rounds], self._config, more)
        finally:
            counted.remove()
        clock.lap("verify")
        answer.seconds = {"total": clock.seconds(self.target.device)["total"]}
        return answer


class _Rounds(StoppingCriteria):
    """Gives an answer the new tokens of every round, up to where a stopper ends it.

    transformers up to 5.17 also asks it of drafts, before the target's forward over them: they are no text yet.
    """

    def __init__(self, stopper: Stopper, answer: Generation, prompt: int) -> None:
        self.stopper, self.answer, self.length, self.verified = stopper, answer, prompt, False

    def forward_begins(self, *_: Any) -> None:
        """The target verifies what was drafted."""
        self.verified = True

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """[1] bool."""
        if not self.verified:
            return input_ids.new_zeros(1, dtype=torch.bool)
        self.verified = False
        new = input_ids[0, self.length :].tolist()
        self.length += len(new)
        if new and not self.answer.finish_reason:
            self.stopper.extend(self.answer, new, [0] * (len(new) - 1) + [-1])
        return input_ids.new_full((1,), bool(self.answer.finish_reason), dtype=torch.bool)
