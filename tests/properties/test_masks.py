"""Random conversations in the forms of published chat templates: the trained tokens equal a computation of their own.

A form is spelled out twice, as a Jinja template and as pieces of text that are trained or not. The tokenizer has one
token for a character, and special tokens, so the pieces say the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, strategies
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draft_heads.data.text.rendering import ChatRenderer, ConversationError

SPECIAL = "<|im_start|> <|im_end|> <|eot|> <|header|> <|/header|> <turn> </turn> [INST] [/INST] <|system|> <|user|> "
SPECIAL += (
    "<|assistant|> <|end|> <|start|> <|message|> <|channel|> <|return|> <|role|> <|/role|> <｜User｜> <｜Assistant｜>"
)
CHARACTERS = sorted({chr(code) for code in range(32, 127)} | set("\né😀"))


def character_tokenizer(chat_template: str, bos: str = "<s>") -> PreTrainedTokenizerFast:
    """A token for each of CHARACTERS, and the special ones."""
    names = ["<unk>", "<s>", "</s>", *SPECIAL.split(), *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    special = {"bos_token": bos, "eos_token": "</s>", "unk_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL.split(), **special)
    wrapped.chat_template = chat_template
    return wrapped


@dataclass(frozen=True)
class Form:
    """The texts around those of a conversation; `{}` is the text of a turn.

    prompt  begins an assistant's turn, and is the generation prompt
    lead    between the prompt and the answer: the target writes it where it is whitespace
    close   after an answer, its end token last; `last` in its place at the end of the conversation
    tail    after that
    final   after the last turn without generation prompt
    """

    user: str
    prompt: str
    close: str
    last: str | None = None
    lead: str = ""
    tail: str = ""
    final: str = ""
    system: str | None = None  # None: the system text stands in the first user turn
    first: str = ""
    bos: str = "<s>"
    trims: bool = False
    user_ends: bool = False  # the target generates the token that opens a user turn

    def template(self, block: str = "") -> str:
        """The form in Jinja; `block`: what a generation block encloses, "" without one."""
        begin, end = ("{% generation %}", "{% endgeneration %}") if block else ("", "")
        text = "m.content | trim" if self.trims else "m.content"
        last = self.close if self.last is None else self.last
        close = f"{{{{ {last!r} if loop.last and not add_generation_prompt else {self.close!r} }}}}"
        prompt, lead, tail = (f"{{{{ {piece!r} }}}}" for piece in (self.prompt, self.lead, self.tail))
        answer = f"{{{{ {text} }}}}"
        enclosed = {
            "": prompt + lead + answer + close + tail,
            "content": prompt + lead + begin + answer + end + close + tail,
            "answer": prompt + begin + lead + answer + close + end + tail,
            "turn": begin + prompt + lead + answer + close + tail + end,
        }[block]
        before, after = (repr(part) for part in self.user.split("{}"))
        rules = "rules + '\\n\\n' if rules and loop.first else ''"
        turns = "{% for m in turns %}{% if m.role == 'user' %}"
        turns += f"{{{{ {before} + ({rules}) + {text} + {after} }}}}{{% else %}}{enclosed}{{% endif %}}{{% endfor %}}"
        system = "{% set rules = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
        system += "{% set turns = messages[1:] %}"
        if self.system is None:
            system += "{% set rules = messages[0].content %}"
        else:
            opening, closing = (repr(part) for part in self.system.split("{}"))
            system += f"{{{{ {opening} + messages[0].content + {closing} }}}}"
        generation = f"{{{{ {self.prompt!r} if add_generation_prompt else {self.final!r} }}}}"
        return f"{{{{ {self.first!r} }}}}" + system + "{% endif %}" + turns + generation

    def pieces(self, messages: list[dict]) -> list[tuple[str, bool]]:
        """(text, whether it is trained) of a recorded conversation."""
        found, rules, turns = [(self.first, False)], "", messages
        if messages[0]["role"] == "system":
            turns = messages[1:]
            if self.system is None:
                rules = messages[0]["content"] + "\n\n"
            else:
                found.append((self.system.replace("{}", messages[0]["content"]), False))
        answered = False  # the turn before is an answer that is trained on
        for number, message in enumerate(turns):
            content, is_last = (
                message["content"].strip() if self.trims else message["content"],
                number + 1 == len(turns),
            )
            if message["role"] == "user":
                before, after = self.user.split("{}")
                opening = next((token for token in ("</s>", *SPECIAL.split()) if before.startswith(token)), "")
                found.append((opening, self.user_ends and answered))
                found.append((before[len(opening) :] + rules + content + after, False))
                rules, answered = "", False
                continue
            answered = message.get("trained", True)
            close = self.last if is_last and self.last is not None else self.close
            ended = any(close.endswith(token) for token in ("</s>", *SPECIAL.split()))
            found += [(self.prompt, False), (self.lead, answered and not self.lead.strip()), (content, answered)]
            if not close.strip() and is_last and self.final == "</s>":
                found += [(close + self.tail, answered), (self.final, answered)]
            else:
                found += [(close, answered and ended), (self.tail, False), (self.final if is_last else "", False)]
        return [*found, (self.final if turns[-1]["role"] == "user" else "", False)]


CHATML = Form("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>", tail="\n")
CHANNELS = Form("<|start|>user<|message|>{}<|end|>", "<|start|>assistant", "<|end|>", "<|return|>")
FORMS = {
    "chatml": Form(**{**vars(CHATML), "system": "<|im_start|>system\n{}<|im_end|>\n"}),
    "chatml, default system text": Form(**{**vars(CHATML), "first": "<|im_start|>system\nBe kind.<|im_end|>\n"}),
    "llama-3": Form(
        "<|header|>user<|/header|>\n\n{}<|eot|>",
        "<|header|>assistant<|/header|>\n\n",
        "<|eot|>",
        system="<|header|>system<|/header|>\n\n{}<|eot|>",
        first="<s>",
        trims=True,
    ),
    "llama-2": Form("<s>[INST] {} [/INST]", "", " </s>", lead=" ", trims=True),
    "llama-2, bos is eos": Form("</s>[INST] {} [/INST]", "", " </s>", lead=" ", trims=True, bos="</s>"),
    "bos of each turn is eos": Form("</s>USER: {}\n", "ASSISTANT:", "", lead=" ", bos="</s>", user_ends=True),
    "gemma": Form("<turn>user\n{}</turn>\n", "<turn>model\n", "</turn>", tail="\n", first="<s>", trims=True),
    "phi": Form(
        "<|user|>\n{}<|end|>\n", "<|assistant|>\n", "<|end|>", tail="\n", final="</s>", system="<|system|>{}<|end|>"
    ),
    "glm, the target generates <|user|>": Form(
        "<|user|>\n{}", "<|assistant|>\n", "", first="<s>", system="<|system|>\n{}", user_ends=True
    ),
    "glm, the target's end is not in the text": Form("<|user|>\n{}", "<|assistant|>\n", "", system="<|system|>\n{}"),
    "glm, </s> at the end": Form("<|user|>\n{}", "<|assistant|>\n", "", "</s>"),
    "glm, [INST] and </s>": Form("[INST]{}", "[/INST]", "", "</s>"),
    "deepseek": Form("<｜User｜>{}", "<｜Assistant｜>", "</s>", system="{}", first="<s>"),
    "mistral": Form("[INST]{}[/INST]", "", "</s>", first="<s>"),
    "channels": Form(
        **{**vars(CHANNELS), "lead": "<|channel|>final<|message|>", "first": "<|start|>system<|message|>1<|end|>"}
    ),
    "another end at the last": Form("<turn>user\n{}<turn>\n", "<turn>model\n", "</turn>", "</s>", tail="\n"),
    "text before the end": Form("<|role|>user<|/role|>{}\n", "<|role|>bot<|/role|>", " (end)<|end|>", tail="\n"),
    "text before two ends": Form("USER: {}\n", "BOT: ", " (end)<|end|>", " (end)</s>", tail="\n"),
    "vicuna": Form("USER: {} ", "ASSISTANT:", "</s>", lead=" ", system="{} ", first="<s>"),
    "words, </s> at the end": Form("USER: {}\n", "ASSISTANT:", "", lead=" ", tail="\n", final="</s>"),
    "words, no end": Form("### Human: {}\n", "### Assistant:", "", lead=" ", tail="\n"),
    "one opening token, no end": Form("<|role|>user<|/role|>{}\n", "<|role|>bot<|/role|>", "", tail="\n"),
    "users' turns end": Form("USER: {}</s>", "ASSISTANT:", "", lead=" ", tail="\n"),
}


def tokens(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """(ids, mask) of pieces, each encoded by itself."""
    encoded = [(tokenizer(text, add_special_tokens=False)["input_ids"], trained) for text, trained in pieces if text]
    return [i for ids, _ in encoded for i in ids], [trained for ids, trained in encoded for _ in ids]


# what the special tokens are spelled with is frequent in what people say
TEXT = strategies.text(strategies.sampled_from("ab <|/>\nus.é😀"), min_size=1, max_size=9).filter(
    lambda text: text.strip() and not any(token in text for token in ("<s>", "</s>", *SPECIAL.split()))
)


@strategies.composite
def conversations(draw: strategies.DrawFn) -> list[dict]:
    """One to three questions with their answers, with or without a system text, a last question without its answer."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(strategies.booleans()) else []
    for _ in range(draw(strategies.integers(1, 3))):
        messages += [{"role": "user", "content": draw(TEXT)}, {"role": "assistant", "content": draw(TEXT)}]
    if draw(strategies.booleans()):
        messages[-1]["trained"] = draw(strategies.booleans())
    return [*messages, {"role": "user", "content": draw(TEXT)}] if draw(strategies.booleans()) else messages


@pytest.mark.parametrize("form", FORMS)
@given(messages=conversations(), block=strategies.sampled_from(["", "content", "answer", "turn"]))
def test_the_mask_of_a_form_is_that_of_its_pieces(form, messages, block):
    form = FORMS[form]
    tokenizer = character_tokenizer(form.template(block), form.bos)
    renderer = ChatRenderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|user|>")] if form.user_ends else [])
    ends_otherwise = form.last is not None or form.final  # at the last answer
    seen = messages[:-1] if ends_otherwise and messages[-1]["role"] == "user" else messages
    ids, mask = tokens(tokenizer, form.pieces(seen))
    if not any(mask):
        with pytest.raises(ConversationError):
            renderer.conversation(messages)
        return
    assert marked(tokenizer, *renderer.conversation(messages)) == marked(tokenizer, ids, mask)


@pytest.mark.parametrize("form", FORMS)
@given(texts=strategies.tuples(TEXT, TEXT, TEXT))
def test_the_next_turn_follows_the_end_of_an_answer(form, texts):
    """Where the target generates the token that opens a user turn, that token is the next turn's first."""
    form = FORMS[form]
    tokenizer = character_tokenizer(form.template(), form.bos)
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts)]
    pieces = replace(form, user_ends=False).pieces(messages)[:-1]
    after = max(i for i, (text, trained) in enumerate(pieces) if text and trained)
    expected, _ = tokens(tokenizer, [*pieces[after + 1 :], (form.prompt, False)])
    renderer = ChatRenderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|user|>")] if form.user_ends else [])
    assert renderer.next_turn(messages) == expected
    assert renderer.prompt(messages)[-len(expected) :] == expected


def marked(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[bool]) -> str:
    """The tokens as text, the trained ones between ⟦ and ⟧."""
    names = [f"⟦{name}⟧" if trained else name for name, trained in zip(tokenizer.convert_ids_to_tokens(ids), mask)]
    return "".join(names).replace("⟧⟦", "")


THOUGHTS = (  # as Qwen3: a thought is moved out of the text, and dropped before the last question
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "BLOCK{% set thought, text = m.reasoning_content or '', m.content %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] %}{% set text = text.split('</think>')[1] %}"
    "{% endif %}{% if loop.index0 > ns.asked %}{{ '<think>' + thought | trim('\n') + '</think>\n' }}{% endif %}"
    "{{ text.lstrip('\n') + '<|im_end|>' }}END{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\nBEGINS' }}{% endif %}"
)


@pytest.mark.parametrize("begins", ["", "<think>", "<think>\n"])
@pytest.mark.parametrize("recorded", ["in the text", "as a key", "not at all"])
@given(messages=conversations(), thought=TEXT, block=strategies.booleans())
def test_a_thought_is_trained_where_the_template_shows_it(begins, recorded, messages, thought, block):
    words = {"BLOCK": "{% generation %}", "END": "{% endgeneration %}"} if block else {"BLOCK": "", "END": ""}
    template = THOUGHTS
    for name, text in {**words, "BEGINS": begins.replace("\n", "\\n")}.items():
        template = template.replace(name, text)
    tokenizer, given_messages, pieces = character_tokenizer(template), [], []
    unseen = messages[-1:] if messages[-1]["role"] == "user" else []  # for it the last answer would be an earlier one
    messages = messages[: len(messages) - len(unseen)]
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        answer, trained = message["role"] == "assistant", message.get("trained", True)
        content = message["content"].lstrip("\n") if answer else message["content"]
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        if answer and i > last:
            written = thought.strip("\n") if recorded != "not at all" else ""
            shown = f"<think>{written}</think>\n"
            prompted = next(begins[:n] for n in range(len(begins), -1, -1) if shown.startswith(begins[:n]))
            pieces += [(prompted, False), (shown[len(prompted) :], trained and bool(written))]
        pieces += [(content + "<|im_end|>" if answer else content, answer and trained)]
        pieces.append(("\n" if answer else "<|im_end|>\n", False))
        further = {"reasoning_content": thought} if recorded == "as a key" else {}
        text = f"<think>\n{thought}\n</think>\n\n{content}" if recorded == "in the text" else message["content"]
        given_messages.append({**message, "content": text, **further} if answer else message)
    renderer = ChatRenderer(tokenizer)
    ids, mask = tokens(tokenizer, pieces)
    if any(mask):
        given_messages += unseen
        assert marked(tokenizer, *renderer.conversation(given_messages)) == marked(tokenizer, ids, mask)
