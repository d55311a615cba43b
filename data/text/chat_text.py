"""Messages to text through the tokenizer's own chat template, in the form that it reads, and nothing left out."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from copy import copy
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from draft_heads.data.text.chat_template import (
    TEMPLATE_ERRORS,
    check_usable,
    has_generation_block,
    reads_setting,
    template_source,
    with_whole_offsets,
)
from draft_heads.data.text.errors import ControlTokenError, ConversationError, check_unicode
from draft_heads.data.text.marks import (
    PLACEHOLDER,
    control_token,
    lost_word,
    marked,
    marked_calls,
    marked_names,
    respelled_tokens,
    texts_in,
    unread,
    without_a_place,
)
from draft_heads.data.text.row_keys import MAY_BE_READ
from draft_heads.data.text.template_probe import (
    SAMPLE_TOOLS,
    MessageForm,
    Messages,
    TemplateProbe,
    message_form,
)
from draft_heads.data.text.thoughts import MARKS
from draft_heads.data.text.token_spans import AnswerForm
from draft_heads.data.text.turns import turn_name

Extra = Mapping[str, Any] | None
"""What else the chat template of one conversation reads, by name: `tools`, `documents`, …"""

_OF_A_RESULT = ("tool_call_id", "name")  # name the call that a tool's turn answers; templates may do without

_OF_THOUGHTS = frozenset({*MARKS, *MARKS.values()})


class ChatText:
    """Renders with one tokenizer's chat template.

    ValueError without a template or token offsets, and for a template that renders no user's text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Collection[int] = ()) -> None:
        """end_token_ids: the target's, where it has others than the tokenizer's EOS."""
        check_usable(tokenizer)
        self.tokenizer = tokenizer
        self._splits = with_whole_offsets(tokenizer)
        self._respelled = respelled_tokens(tokenizer)
        self.has_generation_block = has_generation_block(tokenizer.get_chat_template())
        self._end_token_ids = {*end_token_ids, tokenizer.eos_token_id} - {None}
        added, no_mark = tokenizer.added_tokens_decoder, {tokenizer.bos_token_id, tokenizer.unk_token_id}
        special = {*tokenizer.all_special_ids, *(token for token in added if added[token].special)}
        self._special = frozenset(special - no_mark | self._end_token_ids)  # mark turns and channels, and are no text
        # beside them what else a tokenizer never splits, as DeepSeek's <｜User｜> or Gemma's runs of line breaks
        self._marks = self._special | {token for token in added if added[token].content.strip()} - no_mark
        self._message_form = MessageForm()
        try:
            self._message_form = message_form(self.text)
        except ValueError as error:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} cannot be used: {error}; pass another chat_template"
            ) from None
        self.probe = TemplateProbe(template_source(tokenizer), self.text, self._encode, self._special, self._marks)
        self._forms_shown: set[tuple] = set()  # the forms of conversations in which each text is shown

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a recorded answer."""
        return self.closing | self._end_token_ids

    @cached_property
    def closing(self) -> frozenset[int]:
        """`TemplateProbe.closing`; every special token where the template refuses the samples that show it."""
        return self._special if self.probe.closing is None else self.probe.closing

    @cached_property
    def form(self) -> AnswerForm:
        """What stands around the text of an answer.

        Behind it that is what the template writes before the target's end token, where its first mark closes thoughts
        too, and so is no end. Example: of `<|im_end|><|endofturn|>` the first (HyperCLOVA X).
        """
        behind = self.probe.behind_answers
        stop = next((i for i, token in enumerate(behind) if token in self._end_token_ids), 0)
        return AnswerForm(self.probe.scaffold, behind[:stop] if {*behind[:1]} & self.probe.ends_of_thoughts else ())

    def text(self, messages: Messages, add_generation_prompt: bool = False, extra: Extra = None) -> str:
        """The messages as text; ConversationError where the chat template refuses them."""
        arguments = self._arguments(extra)
        try:
            text: Any = self.tokenizer.apply_chat_template(
                self._for_template(messages, extra),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
            return text
        except TEMPLATE_ERRORS as error:
            raise ConversationError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses the conversation "
                f"(roles {[m.get('role') for m in messages]}): {error}"
            ) from None

    def checked_text(self, messages: Messages, add_generation_prompt: bool = False, extra: Extra = None) -> str:
        """`text`, of which the template leaves nothing out; ControlTokenError as `check_texts`.

        What is to be trained on is looked for when it is located. The answers in a prompt may be the target's own,
        which hold what it has generated: control tokens in them are not looked for.
        """
        text = self.text(messages, add_generation_prompt, extra)
        self.check_texts(messages, answers=not add_generation_prompt, extra=extra)
        self._check_shown(text, messages, extra, add_generation_prompt)
        self.check_read(messages, extra)
        return text

    def answer_after(self, messages: Messages, answer: str, extra: Extra = None) -> list[int]:
        """Token ids of a recorded answer's text as the target wrote them after the prompt for `messages`.

        Of the white space that the template puts between prompt and answer ("ASSISTANT:", " Hello.") the target writes
        its part, which a recorded text lacks. Tokenised alone where it begins within the prompt's last token.
        """
        prompt, placeholder = self.text(messages, True, extra), self._placeholder(messages)
        shown = self.text([*messages, {"role": "assistant", "content": placeholder}], extra=extra)
        before, found, _ = shown.partition(placeholder)
        between = before[len(prompt) :] if found and before.startswith(prompt) else ""
        ids, whole = self._encode(prompt)[0], self._encode(prompt + ("" if between.strip() else between) + answer)[0]
        return whole[len(ids) :] if answer and whole[: len(ids)] == ids else self._encode(answer)[0]

    def check_texts(self, messages: Messages, answers: bool = True, extra: Extra = None) -> None:
        """ControlTokenError where a text of a message or of `extra` holds a token that marks turns, as `<|im_end|>`.

        The tokenizer would make the token itself of it, which ends or begins a turn for the target. Other special
        tokens (`<filename>`) are texts as any.

        answers: read the assistant's texts too; the target's own may hold what it has generated
        """
        holders = [(number, turn_name(messages, number), message) for number, message in enumerate(messages)]
        holders += [(0, repr(name), {name: value}) for name, value in (extra or {}).items()]
        for number, where, mapping in holders:
            role = mapping.get("role")
            if role == "assistant" and not answers:
                continue
            control = self._in_no_answer if role == "assistant" else self._control | self._in_source
            for text in texts_in({key: value for key, value in mapping.items() if key != "role"}):
                if found := control_token(text, control, lambda one: self._encode(one)[0], self._respelled):
                    raise ControlTokenError(
                        f"a control token in someone's text: {found!r} in {where} would be encoded as "
                        "that token and not as its characters; write it otherwise, for example with a space",
                        number,
                    )

    def sound_part(
        self, messages: Messages, skip_bad_rows: bool, generate: bool = False, extra: Extra = None
    ) -> tuple[Messages, str | None]:
        """(the messages before the first that holds a control token, why), (all messages, None) where none does.

        ControlTokenError for one unless `skip_bad_rows`, and where no answer is left (`generate`: no question; recorded
        answers are then not read).
        """
        try:
            self.check_texts(messages, answers=not generate, extra=extra)
        except ControlTokenError as error:
            sound = messages[: error.turn]
            if not skip_bad_rows or all(turn["role"] != ("user" if generate else "assistant") for turn in sound):
                raise
            return sound, str(error)
        return messages, None

    def check_read(self, messages: Messages, extra: Extra = None) -> None:
        """ConversationError for a key of a message or of `extra` that the chat template does not read."""
        if key := self._unread_key(messages, dict(extra or {})):
            raise ConversationError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not read {key}, which the conversation "
                "has; take it out, or pass a chat_template that reads it and sets it to nothing else"
            )

    def _unread_key(self, messages: Messages, extra: dict[str, Any]) -> str | None:
        """The first key of a message or of `extra` that the template does not read; None where it reads all.

        A key is read if the conversation, or its part that ends with the message, reads otherwise without it: templates
        may leave the thoughts of earlier turns out. Of documents each text is looked for, of tools each name, and of
        calls each name and what is among its arguments. A setting in `extra` (a boolean, a word) may be the template's
        default, so it is read if it is one of the template's variables.
        """

        def rendered(some: Messages, arguments: dict[str, Any], prompt: bool = False) -> str | None:
            try:
                return self.text(some, prompt, arguments)
            except ConversationError:  # refused: without the key it is another conversation
                return None

        template = self.tokenizer.get_chat_template(tools=extra.get("tools"))
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        asked = messages[: users[-1] + 1] if users else messages
        for name, value in extra.items():
            marks: dict[str, str] = {}
            mark_all = {"documents": marked, "tools": marked_names}.get(name)
            other = mark_all(name, value, marks) if mark_all else value
            if marks and (text := rendered(asked, extra | {name: other}, prompt=True)) is not None:
                if lost := unread(name, marks, [text]):
                    return lost
                continue
            if value == "":  # which may be another than none, and else asks for nothing
                continue
            if isinstance(value, list | dict):
                rest = {key: one for key, one in extra.items() if key != name}
                read = rendered(asked, extra, prompt=True) != rendered(asked, rest, prompt=True)
            else:
                read = reads_setting(template, name, value)
            if not read:
                return repr(name)
        for number, message in enumerate(messages):
            for name in sorted(message.keys() - {"role", "content", "trained", MAY_BE_READ}):
                if message["role"] == "tool" and name in _OF_A_RESULT:
                    continue
                without, ends = list(messages), (number + 1, len(messages))
                if name == "tool_calls":
                    marks = {}
                    without[number] = {**message, name: marked_calls(message[name], marks)}
                    if lost := unread(name, marks, (rendered(without[:end], extra) for end in ends)):
                        return lost
                    continue
                without[number] = {key: value for key, value in message.items() if key != name}
                if all(rendered(messages[:end], extra) == rendered(without[:end], extra) for end in ends):
                    return repr(name)
            if message["role"] == "tool":
                other = [*messages[:number], {**message, "content": "SAMPLERESULT"}, *messages[number + 1 :]]
                if rendered(messages, extra) == rendered(other, extra):
                    return "the text of a tool turn"
            if message["role"] in ("tool", "system"):
                said = str(message.get("content") or "").strip() or self._placeholder(messages)  # a text may be empty
                own, other = (
                    rendered([*messages[:number], {**message, "content": said, **role}, *messages[number + 1 :]], extra)
                    for role in ({}, {"role": "assistant"})
                )
                bare = not number and not self._closes(own or "", said)  # before all turns
                if own == other and not bare:
                    which = " that is not the first" if message["role"] == "system" and number else ""
                    return f"the role of a {message['role']} turn{which}, which it takes for an answer"
        return None

    def _closes(self, text: str, content: str) -> bool:
        """Whether a token that ends an answer follows `content` in the rendering `text`."""
        after = text.partition(content)[2].lstrip()
        added = self.tokenizer.added_tokens_decoder
        return any(after.startswith(added[token].content) for token in self.ends if token in added)

    @cached_property
    def _control(self) -> frozenset[str]:
        """The added tokens that mark turns and channels, begin or end texts, or fill them up.

        One for unknown text may stand in a text, also where it fills up; but it is an end, too, in GPT-2's tokenizers.
        """
        tokenizer = self.tokenizer
        ids = self.ends | self.probe.marks | {tokenizer.bos_token_id}
        ids |= {tokenizer.pad_token_id} - {tokenizer.unk_token_id}
        added = tokenizer.added_tokens_decoder
        return frozenset(added[i].content for i in ids if i in added)

    @cached_property
    def _in_no_answer(self) -> frozenset[str]:
        """The control tokens that an assistant's text does not have: a recorded thought has its own marks."""
        added = self.tokenizer.added_tokens_decoder
        return self._control - (_OF_THOUGHTS - {added[token].content for token in self.ends if token in added})

    @cached_property
    def _in_source(self) -> frozenset[str]:
        """The special tokens that the template may write, as those around tool calls."""
        source = template_source(self.tokenizer)
        added = self.tokenizer.added_tokens_decoder
        return frozenset(added[i].content for i in self._special & added.keys() if added[i].content in source)

    def _for_template(self, messages: Messages, extra: Extra) -> Messages:
        """The messages without `trained`, which is for the mask alone, texts and calls in the form that is read."""
        chat = (self._for_tools if (extra or {}).get("tools") else None) or self
        read = [{key: value for key, value in message.items() if key != "trained"} for message in messages]
        return chat._message_form.of(read)

    def _arguments(self, extra: Extra) -> dict[str, Any]:
        """The further arguments; ConversationError for a name that is `apply_chat_template`'s own."""
        if not extra:
            return {}
        if extra.get("tools") and self._of_tools_differs:
            raise ConversationError(
                f"one chat template marks and ends the turns of all conversations; {self.tokenizer.name_or_path!r} has "
                "another for those with tools (tool_use), which does it otherwise; pass the one that is meant as "
                "chat_template"
            )
        own = set(inspect.signature(self.tokenizer.apply_chat_template).parameters) - {"tools", "documents", "kwargs"}
        if taken := own & set(extra):
            raise ConversationError(
                f"a chat template's further arguments are named otherwise than {', '.join(sorted(own))}; got "
                f"{', '.join(sorted(taken))}; leave it out"
            )
        return dict(extra)

    @cached_property
    def _for_tools(self) -> ChatText | None:
        """That of the tokenizer's template for conversations with tools, where it has one beside its default one."""
        templates = self.tokenizer.chat_template
        if not isinstance(templates, dict) or "tool_use" not in templates:
            return None
        other = copy(self.tokenizer)
        other.chat_template = SAMPLE_TOOLS + templates["tool_use"]  # which may refuse conversations without
        return ChatText(other, self._end_token_ids)

    @cached_property
    def _of_tools_differs(self) -> bool:
        """Whether the tokenizer's template for tools ends or marks turns or takes texts otherwise than its default one,
        which was looked through."""
        try:
            of_tools = self._for_tools
        except ValueError:
            return True
        if of_tools is None:
            return False
        same_ends = of_tools.probe.closing in (None, self.probe.closing)
        forms = [(one.has_generation_block, one._message_form.parts) for one in (self, of_tools)]
        return not same_ends or forms[0] != forms[1]

    def _check_shown(self, text: str, messages: Messages, extra: Extra, add_generation_prompt: bool) -> None:
        """ConversationError where `text`, the rendering of `messages`, leaves out the text of a message.

        A text that is left out may stand elsewhere, in another message or in the template's own words. So each text
        needs a place of its own in `text`, and the first conversation of each form (roles, further keys) is rendered
        once more with other words in each message. Where either misses one, the messages are tried one by one.

        Answers that are to be trained on are looked for when they are located.
        """
        contents = {n: m["content"] for n, m in enumerate(messages) if isinstance(m.get("content"), str)}
        texts = {n: content.strip() for n, content in contents.items() if content.strip()}
        answers = {n for n in texts if messages[n]["role"] == "assistant" and messages[n].get("trained") is not False}
        trained = set() if add_generation_prompt else answers
        sought = [n for n in texts if messages[n]["role"] != "tool" and n not in trained]
        form = (add_generation_prompt, *(extra or ()), *((m["role"], n in trained, *m) for n, m in enumerate(messages)))
        missing = unplaced = without_a_place(text, texts).intersection(sought)
        if not missing and form not in self._forms_shown:
            words = {n: f"{self._placeholder(messages)}{n}." for n in sought}
            others = [{**m, "content": words[n]} if n in words else m for n, m in enumerate(messages)]
            missing = without_a_place(self.text(others, add_generation_prompt, extra), words)
        for number in sought if missing else ():
            self.check_text_shown(messages, number, extra, add_generation_prompt)
        source = template_source(self.tokenizer)
        for number in sorted(unplaced):  # rewritten, or cut
            role = messages[number]["role"]
            word = None if role == "assistant" else lost_word(text.casefold(), texts[number], source)  # thoughts may go
            if word:
                raise ConversationError(
                    f"the chat template leaves out a part of {turn_name(messages, number)}, with {word!r:.40}; write "
                    "it otherwise, or pass a chat_template that renders it"
                )
        self._forms_shown.add(form)

    def check_text_shown(self, messages: Messages, number: int, extra: Extra, add_generation_prompt: bool) -> None:
        """ConversationError where the template leaves out the text of message `number`, whatever it is.

        Words beside calls may be thoughts, which the turns after them put out of sight.
        """
        message, placeholder = messages[number], self._placeholder(messages)
        replaced = [*messages[:number], {**message, "content": placeholder}, *messages[number + 1 :]]
        texts = [self.text(replaced, add_generation_prompt, extra)]
        texts += [self.text(replaced[: number + 1], extra=extra)] if message.get("tool_calls") else []
        if not any(placeholder in text for text in texts):
            raise ConversationError(
                f"the chat template leaves out the {message['role']}'s text of a conversation that ends with the "
                f"{messages[-1]['role']}'s turn: {message['content'][:40]!r} ({turn_name(messages, number)}); leave it "
                "out or put it into another turn, or pass a chat_template that renders it"
            )

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        check_unicode(text)
        encoded: Any = self._splits(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _placeholder(self, messages: Messages) -> str:
        placeholder = PLACEHOLDER
        while any(placeholder in str(message.get("content")) for message in messages):
            placeholder += "X"
        return placeholder
