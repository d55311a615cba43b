"""Messages to token ids through the tokenizer's own chat template, and which of them the assistant wrote.

The assistant's tokens of a turn are those the target would have to generate after the rendered prompt, its
end-of-turn token included and nothing after it. Example, ChatML:

    <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello . <|im_end|> \\n
    0            0    0  0  0          0  0            0         0  1     1 1          0

Every assistant turn is located by rendering the conversation again with a placeholder in its place: the text before and
after the placeholder is the template's, and the rest of the real rendering is the turn. It starts where the generation
prompt ends, or after what the template puts there before each answer (`<|channel|>final<|message|>`). It ends with the
first token that follows it and ends an answer: an end token of the target, or the special token with which the template
closes answers. A token that ends no answer, as the next role's, is not trained, and neither is anything between. Tool
calls are a part of the turn, also where they are a message of their own (gpt-oss), unless the target stops before them:
then the conversation is refused. A `{% generation %}` block chooses among the turns, and leaves out a part of one where
it encloses less; what else it encloses is not trained.

Templates that drop parts of earlier turns (thoughts, an analysis channel) or that end the last turn with another token
are rendered as they are: an earlier answer is what the template leaves of it, the last one is everything the target
would write after the generation prompt. Such a template does not see a question without an answer at the end, for which
it would render the last answer as an earlier one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from draft_heads.data.text.chat_template import blocks_in_buffers
from draft_heads.data.text.chat_text import ChatText, Extra
from draft_heads.data.text.errors import ConversationError, check_unicode
from draft_heads.data.text.marks import PLACEHOLDER, marked_calls
from draft_heads.data.text.template_probe import Messages
from draft_heads.data.text.thoughts import empty_thought
from draft_heads.data.text.token_spans import (
    Rendering,
    Turn,
    answer_tokens,
    between_blocks,
    blocks_of,
    common_prefix,
    common_suffix,
    end_between,
    end_of_placeholder,
    first_token,
    in_two,
    is_bare,
    left_out,
    misplaced,
    packed,
    part_in_block,
    unlocated,
    untrained,
)
from draft_heads.data.text.turns import last_question, texts_of, trained_answers, turn_name

__all__ = ["ConversationError", "Extra", "Messages", "check_unicode"]

logger = logging.getLogger(__name__)


class ChatRenderer(ChatText):
    """Messages to tokens and the assistant's mask, with one tokenizer's chat template."""

    _prompt_differs = False  # whether a recorded answer was logged that does not follow its prompt
    _joins_words = False  # the same for one whose first token begins within its prompt

    # ---- rendering ------------------------------------------------------------------------------

    def prompt(self, messages: Messages, extra: Extra = None) -> list[int]:
        """Token ids [L] of `messages` with the generation prompt, as `checked_text` checks it.

        ConversationError where it ends with an answer, after which the target writes none, or goes on with that one.
        """
        text = self.checked_text(messages, add_generation_prompt=True, extra=extra)
        ids = self._encode(text)[0]
        if messages[-1]["role"] == "assistant" and (ids[-1] in self.ends or text == self.text(messages, extra=extra)):
            raise ConversationError(
                "the last message is the assistant's, and this chat template begins no answer after it (received the "
                f"roles {[message['role'] for message in messages]}); end with a user's or a tool's message"
            )
        return ids

    def answer_text(self, answer: Sequence[int], end_token_ids: Collection[int]) -> tuple[str, bool]:
        """The text of `answer_tokens`, stripped, and whether that is all of the answer."""
        kept = answer_tokens(answer, end_token_ids, self.form)
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).strip(), kept == answer_tokens(answer, end_token_ids, self.form._replace(scaffold=()))

    def conversation(self, messages: Messages, extra: Extra = None) -> tuple[list[int], list[bool]]:
        """(input_ids [L], assistant_mask [L]); see the module's docstring, and `spans` for errors."""
        ids, mask, _ = self.spans(messages, extra)
        return ids, mask

    def spans(
        self, messages: Messages, extra: Extra = None
    ) -> tuple[list[int], list[bool], dict[int, tuple[int, int]]]:
        """As `conversation`, and [first, last) token of each turn to train on, by its number in `messages`.

        ControlTokenError as `check_texts`; ConversationError where the mask is all 0 or all 1, where a turn that is to
        be trained on has no token, and where the template leaves out text of an answer to the last question.
        """
        if all(message.get("trained") is False for message in messages if message["role"] == "assistant"):
            raise ConversationError("no assistant turn is to be trained on; leave the conversation out")
        messages = self.answered(messages, extra)
        text = self.checked_text(messages, extra=extra)
        self.check_answers(text, messages, extra)
        whole = Rendering(messages, extra, text, *self._encode(text))
        if self.has_generation_block and blocks_in_buffers(self.tokenizer.get_chat_template()):
            raise misplaced()
        marked = self._block_mask(whole) if self.has_generation_block else None
        mask, spans = [False] * len(whole.ids), {}
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("trained") is not False:
                first, last = spans[number] = self._token_span(whole, number, marked)
                answer = str(message.get("content") or "").strip() if first < last else ""
                bare = answer and is_bare(text, whole.ids[first:last], whole.offsets[first:last], self.ends)
                lost = bare and not str(self.tokenizer.decode(self._encode(answer)[0])).strip()
                if lost or (first == last and marked is None):
                    raise untrained(turn_name(messages, number), answer)
                holes = between_blocks(first, last, text, whole.offsets, marked) if marked else ()
                mask[first:last] = [i not in holes for i in range(first, last)]
        enclosed = mask if marked is None else [trained or mark for trained, mark in zip(mask, marked)]
        if all(enclosed) or not any(mask):
            found = "no token" if not any(mask) else "every token"
            raise ConversationError(
                f"{found} of the conversation is the assistant's (starts {text[:60]!r}); check that its assistant "
                "turns are not empty and that the chat template renders both roles, and that a "
                "{% generation %} block, where it has one, encloses what the assistant writes and nothing else"
            )
        return whole.ids, mask, spans

    def shortened(self, messages: Messages, extra: Extra = None) -> list[int]:
        """Which turns, trained answers to earlier questions, the template renders without a part, as thoughts."""
        messages = self.answered(messages, extra)
        last = last_question(messages)
        earlier = {number: texts_of(messages[number]) for number in trained_answers(messages) if number < last}
        shown = packed(self.text(messages, extra=extra)) if earlier else ""
        return [number for number, texts in earlier.items() if any(packed(text) not in shown for text in texts)]

    def answered(self, messages: Messages, extra: Extra = None) -> Messages:
        """The messages without a question at the end for whose sake the template renders those before it otherwise;
        ConversationError, as `checked_text`, where it leaves something of those out."""
        if messages[-1]["role"] != "user":
            return messages
        answered = self.checked_text(messages[:-1], extra=extra)
        return messages if self.text(messages, extra=extra).startswith(answered) else messages[:-1]

    def check_answers(self, text: str, messages: Messages, extra: Extra) -> None:
        """ConversationError where the rendering `text` leaves out a part of a trained answer to the last question.

        A rendering that begins otherwise than the prompt for that answer is logged once, and so is an empty thought.
        """
        asked = messages[: last_question(messages) + 1]
        answers = [number for number in trained_answers(messages) if number >= len(asked)]
        if not asked or not answers:
            return
        before = self.text(asked, extra=extra)
        shown = packed(text.removeprefix(before))
        for number, answer in ((at, said) for at in answers for said in texts_of(messages[at])):
            if count := left_out(answer, shown):
                raise ConversationError(
                    f"the chat template leaves out at least {count:,} characters of {turn_name(messages, number)}, "
                    f"which is to be trained on: {answer.strip()[:40]!r}; use labels generate, or a chat_template that "
                    "keeps them"
                )
        prompt = self.text(asked, add_generation_prompt=True, extra=extra)
        said, empty = texts_of(messages[answers[0]]), None
        if len(said) == 1 and answers[0] == len(asked) and not self.probe.scaffold:
            empty = empty_thought(prompt, text.removeprefix(prompt), said[0])
        if self._prompt_differs or (text.startswith(prompt) and empty is None):
            return
        self._prompt_differs = True
        if not text.startswith(prompt):
            logger.warning(
                "prompts end with %r, and the chat template does not render a recorded answer after that: the rows "
                "are other texts than the target writes; use its own answers (labels generate), or another "
                "chat_template",
                prompt[-24:],
            )
        else:
            logger.warning(
                "prompts end with %r, and the chat template writes %r before a recorded answer without thoughts: the "
                "rows are other texts than a target writes that thinks; record the thoughts, use its own answers "
                "(labels generate), or a setting for answers without, if the template has one (chat_template "
                "own,enable_thinking=false)",
                prompt[-24:],
                empty,
            )

    def next_turn(self, messages: Messages, extra: Extra = None, ended_by: int | None = None) -> list[int]:
        """Token ids from after the last answer's end-of-turn token to the end of the next generation prompt.

        `messages` ends with assistant, user. Example, ChatML: `\n <|im_start|> user \n … <|im_start|> assistant \n`.
        The answer's own tokens are kept as generated: only what follows them is rendered, after a placeholder.

        ended_by: the answer's last token, left out where it begins the next turn, as GLM-4's `<|user|>`
        """
        *_, answer, question = messages
        if (answer["role"], question["role"]) != ("assistant", "user"):
            raise ValueError(f"next_turn needs assistant, user at the end, received {[m['role'] for m in messages]}")
        placeholder = self._placeholder(messages)
        before = messages[:-2] + [{**answer, "content": placeholder}]
        text = self.text(before + [question], add_generation_prompt=True, extra=extra)
        end = end_of_placeholder(text, placeholder)
        ids, offsets = self._encode(text)
        own = end + len(common_prefix(text[end:], self.text(before, extra=extra).rpartition(placeholder)[2]))
        first = first_token(offsets, end)
        stop = end_between(first, own, ids, offsets, self.closing)
        return ids[first + (ids[first : first + 1] == [ended_by]) if stop is None else self._whole_end(ids, stop) :]

    def end_of_turn(self) -> int | None:
        """The added token the template closes an answer with, None when it has none."""
        asked = {"role": "user", "content": "a"}
        text = self.text([*self.probe.opening, asked, {"role": "assistant", "content": PLACEHOLDER}])
        ids, offsets = self._encode(text)
        end = end_of_placeholder(text, PLACEHOLDER)
        found = next((i for i, (start, _) in zip(ids, offsets) if start >= end and i in self._marks), None)
        if found is None and not text[end:].strip():  # it may close every answer but the last (Qwen 1.5, Yi)
            found = next(iter(self.probe.closing or ()), None)
        if found in self.probe.ends_of_thoughts - self._end_token_ids:
            logger.warning(
                "the chat template closes an answer with %r, as the thought before it: answers end at the tokenizer's "
                "EOS, and where generation_config.json says",
                self.tokenizer.decode(found),
            )
            return None
        if found is None and (closing := text[end:].strip()):
            logger.warning(
                "the chat template closes an answer with %r, in which the tokenizer %s has no special token: answers "
                "end at its EOS only; take the tokenizer that the template was made for",
                closing[:40],
                self.tokenizer.name_or_path,
            )
        return found

    # ---- turns ---------------------------------------------------------------------------------------------

    def _token_span(self, whole: Rendering, number: int, marked: list[bool] | None) -> tuple[int, int]:
        """[first, last) token to train of the assistant's turn `number`."""
        text, ids, offsets = whole.text, whole.ids, whole.offsets
        turn = self._locate(whole, number) or self._turn_of_block(whole, number, marked)
        calls = bool(whole.messages[number].get("tool_calls"))
        if calls:
            end = self._end_of_calls(text, whole.messages, number, whole.extra)
            turn = turn._replace(content=max(turn.content, end))
            self._check_one_run(whole, number, turn.content)
        begins = (end > turn.start and (start >= turn.start or not turn.aligned) for start, end in offsets)
        first = next((i for i, found in enumerate(begins) if found), len(ids))
        if turn.aligned and first and offsets[first - 1][1] > turn.start and not self._joins_words:
            self._joins_words = True
            logger.warning(
                "prompts end within a recorded answer's first token, %r, which is not trained: use labels generate",
                text[slice(*offsets[first - 1])],
            )
        last = first
        while last < len(ids) and offsets[last][0] < turn.content:
            if ids[last] in self.ends and offsets[last][1] > turn.content:
                break  # an end token that takes whitespace before it along
            last += 1
        after = last
        while after < len(ids) and ids[after] not in self.ends and not text[slice(*offsets[after])].strip():
            after += 1
        if after < len(ids) and ids[after] in self.ends:
            stop: int | None = self._whole_end(ids, after + 1)
        else:
            own = self._own_end(whole, number, turn)
            stop = end_between(last, own, ids, offsets, self.ends)
            if stop is None and calls:  # without their end, or as far as a block encloses them
                stop = first if marked is None else max(last, first_token(offsets, own))
        if stopped := next((token for token in ids[first:last] if token in self._end_token_ids), None):
            raise ConversationError(
                f"a trained turn ends once, and the chat template writes {self.tokenizer.decode(stopped)!r}, where the "
                f"target stops, in the midst of {turn_name(whole.messages, number)}, as before its tool calls; give it "
                "weight 0, or pass a chat_template that writes the end after them alone"
            )
        stop = last if stop is None else stop
        return (first, stop) if marked is None else part_in_block(turn, first, stop, text, offsets, marked)

    def _check_one_run(self, whole: Rendering, number: int, end: int) -> None:
        """ConversationError where the result of a call stands before `end`, where the turn that calls ends."""
        messages = list(whole.messages)
        if number + 1 == len(messages) or messages[number + 1]["role"] != "tool":
            return
        messages[number + 1] = {**messages[number + 1], "content": self._placeholder(messages)}
        if len(common_prefix(whole.text, self.text(messages, extra=whole.extra))) < end:
            raise in_two(turn_name(messages, number))

    def _whole_end(self, ids: list[int], stop: int) -> int:
        """`stop`, behind a token that closes an answer, or the place behind all that does and the target's end."""
        closing = list(self.form.closing)
        ends = [stop - 1 + len(closing)] if closing and ids[stop - 1 :][: len(closing)] == closing else []
        whole = (end for end in (*ends, stop) if self._end_token_ids.intersection(ids[end : end + 1]))
        return stop if ids[stop - 1] in self._end_token_ids else next(whole, stop - 1) + 1

    def _locate(self, whole: Rendering, number: int) -> Turn | None:
        """Characters of the assistant's turn `number`; None where the rendering does not show where it is."""
        messages, extra, text = whole.messages, whole.extra, whole.text
        message, history, rest = messages[number], messages[:number], messages[number + 1 :]
        placeholder = self._placeholder(messages)
        prompt = self.text(history, add_generation_prompt=True, extra=extra)
        filled, bare = {**message, "content": placeholder}, {"role": "assistant", "content": placeholder}
        wordless = not str(message.get("content") or "").strip()  # nothing but tool calls
        alone = Turn(len(prompt), True, len(prompt)) if wordless and text.startswith(prompt) else None
        try:
            before, found, after = self.text([*history, filled, *rest], extra=extra).partition(placeholder)
        except ConversationError:  # words beside calls and thoughts, as gpt-oss's
            if alone is None:
                raise
            return alone
        template = before  # what stands before an answer that is nothing but its text
        if message.keys() - {"role", "content", "trained"}:
            for following in (rest, []):  # which may need the further keys
                with suppress(ConversationError):
                    template = self.text([*history, bare, *following], extra=extra).partition(placeholder)[0]
                    break
        content, plain = len(text) - len(after), text.startswith(template) and before == template
        if wordless and message.get("tool_calls"):
            if plain and alone is None and found:  # its end may be another than that of words (Qwen 3.5)
                return Turn(len(before), False, len(before))
            content = min(content, self._end_of_calls(text, messages, number, extra))  # words come later (Gemma 4)
        if not found or placeholder in after or not text.endswith(after):
            return alone
        if plain:
            start, aligned = len(before), False
            if text.startswith(prompt) and len(prompt) > start:  # the prompt begins the answer (a thought)
                start, aligned = len(prompt), True
            elif before.startswith(prompt) and not before[len(prompt) :].strip():
                # The target writes the whitespace between the generation prompt and the content: "ASSISTANT:" is the
                # prompt, " Hello." the answer.
                start, aligned = len(prompt), True
        elif text.startswith(prompt):  # the template moves thoughts out of the content; the target writes them too
            start, aligned = len(prompt), True
        else:  # the same, after a prompt that begins the thought in another way
            start, aligned = len(common_prefix(text, prompt)), False
            if start < len(common_prefix(self.text(history, extra=extra), prompt)):
                return None
        # Without words, a break between words and calls is missing: it is taken for that before the words.
        overlap = wordless and not text[content:start].strip()
        return Turn(start, aligned, content) if start <= content or overlap else alone

    def _own_end(self, whole: Rendering, number: int, turn: Turn) -> int:
        """Where the text ends that the template adds for a turn, whatever follows it."""
        if number + 1 == len(whole.messages):
            return len(whole.text)
        placeholder, message = self._placeholder(whole.messages), whole.messages[number]
        if message.get("tool_calls"):
            until = whole.messages[: number + 1]
            own = self.text(until, extra=whole.extra)
            own = own[self._end_of_calls(own, until, number, whole.extra) :]
            return turn.content + len(common_prefix(whole.text[turn.content :], own))
        replaced = [*whole.messages[:number], {**message, "content": placeholder}]
        own = self.text(replaced, extra=whole.extra).rpartition(placeholder)[2]
        return turn.content + len(common_prefix(whole.text[turn.content :], own))

    def _end_of_calls(self, text: str, messages: Messages, number: int, extra: Extra) -> int:
        """Where the calls of turn `number` end in the rendering `text`, but for brackets that close them.

        Example: after `Rome` in `[f(a="Paris"), f(a="Rome")]<|im_end|>`.
        """
        message = messages[number]
        calls = marked_calls(message["tool_calls"], {}, names=False)  # a tool's turn may repeat a name
        other = self.text([*messages[:number], {**message, "tool_calls": calls}, *messages[number + 1 :]], extra=extra)
        if text == other:
            raise ConversationError(
                f"the chat template leaves out the tool calls of {turn_name(messages, number)}, which is to be trained "
                "on; give it weight 0, or pass a chat_template that keeps them"
            )
        return len(text) - len(common_suffix(text, other))

    # ---- {% generation %} blocks ---------------------------------------------------------------------------

    def _block_mask(self, whole: Rendering) -> list[bool]:
        """The tokens [L] that the template's blocks enclose."""
        messages, arguments = self._for_template(whole.messages, whole.extra), self._arguments(whole.extra)
        encoded: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments
        )
        if list(encoded["input_ids"]) != whole.ids:
            raise ConversationError("the chat template renders differently each time; it must not use the clock")
        return [bool(m) for m in encoded["assistant_masks"]]

    def _turn_of_block(self, whole: Rendering, number: int, marked: list[bool] | None) -> Turn:
        """Characters of a turn that only its block shows: after rewritten turns, that of its number of one each."""
        roles = [message["role"] for message in whole.messages]
        prompt = self.text(whole.messages[:number], add_generation_prompt=True, extra=whole.extra)
        blocks = blocks_of(marked or [], whole.ids, self.ends)
        if marked and whole.text.startswith(prompt):
            start, first = len(prompt), first_token(whole.offsets, len(prompt))
            last = next((last for _, last in blocks if last > first), 1)
        elif len(blocks) == roles.count("assistant"):
            first, last = blocks[roles[:number].count("assistant")]
            start = whole.offsets[first][0]
        else:
            if str(whole.messages[number].get("content") or "").strip():
                self.check_text_shown(whole.messages, number, whole.extra, add_generation_prompt=False)
            raise unlocated(turn_name(whole.messages, number))
        return Turn(start, True, whole.offsets[last - 1][1])
