"""Messages to token ids through the tokenizer's own chat template, and which of them the assistant wrote.

The assistant's tokens of a turn are those the target would have to generate after the rendered prompt, its
end-of-turn token included and nothing after it. Example, ChatML:

    <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello . <|im_end|> \\n
    0            0    0  0  0          0  0            0         0  1     1 1          0

A template that marks them with `{% generation %}` gives the mask. Otherwise every assistant turn is located by
rendering the conversation again with a placeholder in its place: the text before and after the placeholder is the
template's, and the rest of the real rendering is the turn. No separator is ever guessed.

Templates that drop parts of earlier turns (thoughts, an analysis channel) or that end the last turn with another token
are rendered as they are: an earlier answer is what the template leaves of it, the last one is everything the target
would write after the generation prompt.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from draft_heads.data.template_reads import unread_key

Messages = list[dict[str, Any]]
"""Messages as chat templates read them: `role`, `content`, and what else a template knows (`reasoning_content`,
`tool_calls`, `name`, …). An assistant message with `"trained": False` is rendered and its tokens are not trained; the
template does not see that key."""
Extra = Mapping[str, Any] | None
"""What else the chat template of one conversation reads, by name: `tools`, `documents`, …"""

logger = logging.getLogger(__name__)

_GENERATION_BLOCK = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
_PLACEHOLDER = "PLACEHOLDERFORTHEANSWER"


class ConversationError(ValueError):
    """A conversation that cannot be used; the message says why and what to do."""


def check_unicode(text: str) -> None:
    """ConversationError for a text with a lone surrogate, which tokenizers refuse; JSON escapes can make one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"a text must be valid Unicode; got {text[error.start]!r}, half a character or stray byte; send it as UTF-8"
        ) from None


class _Turn(NamedTuple):
    """Character positions of one assistant turn in the rendered text."""

    start: int  # where the target would start to write
    aligned: bool  # whether `start` is the end of the generation prompt: tokens that begin before it are the prompt's
    content: int  # end of the content
    end: int  # end of what the template adds for this turn (end-of-turn token, line break …)
    trained: bool  # whether the turn is to be trained on


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, extra: Extra = None) -> list[int]:
    """Token ids of `messages` with the generation prompt: what the target is asked to continue."""
    return ChatRenderer(tokenizer).prompt(messages, extra)


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, extra: Extra = None
) -> tuple[list[int], list[bool]]:
    """(input_ids [L], assistant_mask [L]) of a whole conversation; ConversationError if the mask is all 0 or all 1."""
    return ChatRenderer(tokenizer).conversation(messages, extra)


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase | None, configured: int | list[int] | None = None
) -> tuple[int, ...]:
    """The tokens that end an answer, ascending; the one rule for labels and decoding.

    The tokenizer's EOS, the special token with which its chat template closes a turn, and `configured`, the EOS tokens
    of the generation config. A model that was trained on its chat template ends a turn with the template's token even
    where the generation config names another.
    """
    ends: set[int | None] = set(configured) if isinstance(configured, list) else {configured}
    if tokenizer is not None:
        ends.add(tokenizer.eos_token_id)
        if tokenizer.chat_template:
            try:
                ends.add(ChatRenderer(tokenizer).end_of_turn())
            except ValueError as error:
                logger.warning("the chat template's end-of-turn token is unknown: %s", error)
    return tuple(sorted(end for end in ends if end is not None))


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that mark turns and channels and are no text, EOS included."""
    special = set(tokenizer.all_special_ids)
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(special - ({tokenizer.bos_token_id, tokenizer.unk_token_id} - {tokenizer.eos_token_id}))


def said(answer: list[int], end_token_ids: Sequence[int], special: Collection[int]) -> tuple[list[int], bool]:
    """(the tokens of an answer behind its last special token, whether that is all of it); end tokens are cut.

    Of an answer in several channels (gpt-oss) this is the last one, which a chat template shows in later turns.
    """
    while answer and answer[-1] in end_token_ids:
        answer = answer[:-1]
    start = max((i + 1 for i, token in enumerate(answer) if token in special), default=0)
    return answer[start:], start == 0


def rendered_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, add_generation_prompt: bool = False, extra: Extra = None
) -> str:
    """The messages as text; ConversationError where the chat template refuses them."""
    try:
        text: Any = tokenizer.apply_chat_template(
            _for_template(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **extra or {}
        )
        return text
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: `+` of a text and an object
        raise ConversationError(
            f"the chat template of {tokenizer.name_or_path!r} refuses the conversation "
            f"(roles {[m['role'] for m in messages]}): {error}"
        ) from None


def check_read(tokenizer: PreTrainedTokenizerBase, messages: Messages, extra: Extra = None) -> None:
    """ConversationError for a key of a message or of `extra` that the chat template does not read."""
    template = tokenizer.get_chat_template(tools=(extra or {}).get("tools"))
    if key := unread_key(template, partial(rendered_text, tokenizer), messages, extra):
        raise ConversationError(
            f"the chat template of {tokenizer.name_or_path!r} does not read {key!r}, which the conversation has; take "
            "it out, or pass --chat_template with a template that reads it"
        )


class ChatRenderer:
    """Renders with one tokenizer's chat template; ValueError without a template or token offsets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; pass --chat_template with "
                "the one the target was trained on: a .jinja file, or the name of a bundled one (vicuna, llama-2)"
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"the assistant mask needs token offsets and {type(tokenizer).__name__} has none; load the fast "
                "tokenizer (a folder with tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.has_generation_block = bool(_GENERATION_BLOCK.search(tokenizer.get_chat_template()))
        self._special = special_token_ids(tokenizer)

    @property
    def may_rewrite(self) -> bool:
        """Whether the template speaks of thoughts or channels, which it may leave out of earlier turns."""
        return any(word in self.tokenizer.get_chat_template() for word in ("think", "reasoning", "channel"))

    # ---- rendering ------------------------------------------------------------------------------

    def prompt(self, messages: Messages, extra: Extra = None) -> list[int]:
        """Token ids [L] of `messages` with the generation prompt."""
        text = self.text(messages, add_generation_prompt=True, extra=extra)
        check_read(self.tokenizer, messages, extra)
        return self._encode(text)[0]

    def answer_text(self, answer: list[int], end_token_ids: Sequence[int]) -> tuple[str, bool]:
        """The text of `said`, and whether that is all of the answer."""
        rest, whole = said(answer, end_token_ids, self._special)
        text = self.tokenizer.decode(rest, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).strip(), whole

    def conversation(self, messages: Messages, extra: Extra = None) -> tuple[list[int], list[bool]]:
        """(input_ids [L], assistant_mask [L]); see the module's docstring."""
        if all(message.get("trained") is False for message in messages if message["role"] == "assistant"):
            raise ConversationError("no assistant turn is to be trained on; leave the conversation out")
        text = self.text(messages, extra=extra)
        check_read(self.tokenizer, messages, extra)
        ids, offsets = self._encode(text)
        turns = self._locate_turns(text, messages, extra)
        if self.has_generation_block:
            mask = self._mask_from_generation_blocks(messages, ids, offsets, turns, extra)
        else:
            mask = [False] * len(ids)
            for turn in turns:
                first, last = self._token_span(turn, ids, offsets)
                mask[first:last] = [True] * (last - first)
        for turn in turns:
            if not turn.trained:
                first, last = self._token_span(turn, ids, offsets)
                mask[first:last] = [False] * (last - first)
        if all(mask) or not any(mask):
            found = "no token" if not any(mask) else "every token"
            raise ConversationError(
                f"{found} of the conversation is the assistant's (starts {text[:60]!r}); check that its assistant "
                "turns are not empty and that the chat template renders both roles, and that a "
                "{% generation %} block, where it has one, encloses what the assistant writes and nothing else"
            )
        return ids, mask

    def next_turn(self, messages: Messages, extra: Extra = None) -> list[int]:
        """Token ids from after the last answer's end-of-turn token to the end of the next generation prompt.

        `messages` ends with assistant, user. Example, ChatML: `\\n <|im_start|> user \\n … <|im_start|> assistant \\n`.
        The answer's own tokens are kept as generated: only what follows them is rendered, after a placeholder.
        """
        *_, answer, question = messages
        if (answer["role"], question["role"]) != ("assistant", "user"):
            raise ValueError(f"next_turn needs assistant, user at the end, received {[m['role'] for m in messages]}")
        placeholder = self._placeholder(messages)
        before = messages[:-2] + [{**answer, "content": placeholder}]
        text = self.text(before + [question], add_generation_prompt=True, extra=extra)
        end = _end_of_placeholder(text, placeholder)
        ids, offsets = self._encode(text)
        tail = _common_prefix(text[end:], self.text(before, extra=extra).rpartition(placeholder)[2])
        first = next(i for i, (start, _) in enumerate(offsets) if start >= end)
        stop = self._end_of_turn_after(first, end + len(tail), ids, offsets)
        return ids[stop if stop is not None else first :]

    def end_of_turn(self) -> int | None:
        """The special token the template closes an answer with, None when it has none."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PLACEHOLDER}]
        text = self.text(messages)
        ids, offsets = self._encode(text)
        end = _end_of_placeholder(text, _PLACEHOLDER)
        return next((i for i, (start, _) in zip(ids, offsets) if start >= end and i in self._special), None)

    # ---- text ----------------------------------------------------------------------------------------------

    def text(self, messages: Messages, add_generation_prompt: bool = False, extra: Extra = None) -> str:
        """See `rendered_text`."""
        return rendered_text(self.tokenizer, messages, add_generation_prompt, extra)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        check_unicode(text)
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _placeholder(self, messages: Messages) -> str:
        placeholder = _PLACEHOLDER
        while any(placeholder in str(message.get("content")) for message in messages):
            placeholder += "X"
        return placeholder

    def _locate_turns(self, text: str, messages: Messages, extra: Extra) -> list[_Turn]:
        """Character positions of the assistant's turns in `text`, the rendering of `messages`."""
        placeholder = self._placeholder(messages)
        turns = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            replaced = messages[:number] + [{**message, "content": placeholder}]
            whole = self.text(replaced + messages[number + 1 :], extra=extra)
            before, found, after = whole.partition(placeholder)
            prompt = self.text(messages[:number], add_generation_prompt=True, extra=extra)
            if not text.startswith(before) and before.startswith(prompt) and text.startswith(prompt):
                before = prompt  # the template moves thoughts out of the content; the target writes them too
            start, content = len(before), len(text) - len(after)
            located = found and placeholder not in after and text.startswith(before) and text.endswith(after)
            if not located or start > content:
                if self.has_generation_block:
                    continue
                raise ConversationError(
                    f"the chat template rewrites more than the text of turn {number} (assistant), so its tokens "
                    "cannot be located; mark them with {% generation %} … {% endgeneration %} in the template"
                )
            own = _common_prefix(after, self.text(replaced, extra=extra).rpartition(placeholder)[2])
            # The target writes the whitespace between the generation prompt and the content: "ASSISTANT:" is the
            # prompt, " Hello." the answer.
            aligned = before.startswith(prompt) and not before[len(prompt) :].strip()
            trained = message.get("trained") is not False
            turns.append(_Turn(len(prompt) if aligned else start, aligned, content, content + len(own), trained))
        return turns

    # ---- tokens --------------------------------------------------------------------------------------------

    def _token_span(self, turn: _Turn, ids: list[int], offsets: list[tuple[int, int]]) -> tuple[int, int]:
        """[first, last) token of a turn, its end-of-turn token included."""
        begins = (end > turn.start and (start >= turn.start or not turn.aligned) for start, end in offsets)
        first = next((i for i, found in enumerate(begins) if found), len(ids))
        last = first
        while last < len(ids) and offsets[last][0] < turn.content:
            last += 1
        stop = self._end_of_turn_after(last, turn.end, ids, offsets)
        return first, stop if stop is not None else last

    def _end_of_turn_after(self, first: int, end: int, ids: list[int], offsets: list[tuple[int, int]]) -> int | None:
        """Index after the first special token at or after token `first` that begins before character `end`."""
        return next((i + 1 for i in range(first, len(ids)) if ids[i] in self._special and offsets[i][0] < end), None)

    def _mask_from_generation_blocks(
        self, messages: Messages, ids: list[int], offsets: list[tuple[int, int]], turns: list[_Turn], extra: Extra
    ) -> list[bool]:
        """The template's own mask, with every run cut or extended so that it ends with the end-of-turn token."""
        encoded: Any = self.tokenizer.apply_chat_template(
            _for_template(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **extra or {}
        )
        if list(encoded["input_ids"]) != ids:
            raise ConversationError("the chat template renders differently each time; it must not use the clock")
        mask = [bool(m) for m in encoded["assistant_masks"]]
        for turn in turns:
            after = next((i for i, (start, _) in enumerate(offsets) if start >= turn.content), len(ids))
            last = next((i for i in range(after - 1, -1, -1) if mask[i]), None)
            if last is None or offsets[last][1] <= turn.start:
                continue
            stop = self._end_of_turn_after(after, turn.end, ids, offsets) or after
            # From `last`: transformers marks only the first byte token of a block's last character.
            mask[last:stop] = [True] * (stop - last)
            rest = stop
            while rest < len(ids) and offsets[rest][0] < turn.end:
                mask[rest] = False
                rest += 1
        return mask


def _for_template(messages: Messages) -> Messages:
    """The messages without `trained`, which is for the mask alone."""
    return [{key: value for key, value in message.items() if key != "trained"} for message in messages]


def _end_of_placeholder(text: str, placeholder: str) -> int:
    start = text.rfind(placeholder)
    if start < 0:
        raise ConversationError(f"the chat template leaves out the assistant's text (it renders {text[-60:]!r})")
    return start + len(placeholder)


def _common_prefix(one: str, other: str) -> str:
    return one[: next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))]
