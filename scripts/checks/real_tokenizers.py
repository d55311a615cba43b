"""What is trained of a conversation with real tokenizers and their chat templates; fails where a rule is broken.

    make check-tokenizers TOKENIZERS=FOLDER

FOLDER holds one folder for each tokenizer (tokenizer.json, tokenizer_config.json; no weights). One without a chat
template of its own is tried with the bundled ones. Conversations of one to three turns, with and without a system text,
are rendered, and for each the trained text of every turn is printed. The rules:

- each turn trains its answer, whole and once, and behind it nothing but the token that ends it;
- what is not trained holds every question and the system text, and no answer;
- the tokens before the last answer begin with the prompt that the target would be asked (a template may put an empty
  thought between the two);
- a control token that someone typed is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from draft_heads.configs.command_line import exit_status

from transformers import PreTrainedTokenizerBase

from draft_heads.data.text.chat_template import BUNDLED, load_tokenizer
from draft_heads.data.text.rendering import ChatRenderer, ConversationError, Messages

SYSTEM = {"role": "system", "content": "Answer kindly."}
TURNS = (
    ("Name a fruit.", "A pear, of course."),
    ("Und auf Deutsch? 日本語でも 😀", "Birne.\n\n  梨 é😀"),
    ("def f(x):\n    return x", "```python\nprint(f(1))\n```"),
)


def conversations() -> Iterator[Messages]:
    """One to three turns, without and with a system text."""
    for system in ([], [SYSTEM]):
        for count in range(1, len(TURNS) + 1):
            turns = [(("user", question), ("assistant", answer)) for question, answer in TURNS[:count]]
            yield system + [{"role": role, "content": text} for turn in turns for role, text in turn]


def broken_rules(renderer: ChatRenderer, messages: Messages) -> tuple[list[str], list[str]]:
    """(the trained text of each turn, the rules that are broken)."""
    ids, mask = renderer.conversation(messages)
    decode = renderer.tokenizer.decode
    runs = [(trained, [i for i, _ in run]) for trained, run in groupby(zip(ids, mask), key=lambda pair: pair[1])]
    answered = [run for trained, run in runs if trained]
    texts = [decode(run, clean_up_tokenization_spaces=False) for run in answered]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    said = [message["content"] for message in messages if message["role"] != "assistant"]
    broken = []
    if len(texts) != len(answers):
        broken.append(f"{len(answers)} answers, {len(texts)} trained runs")
    for text, answer, run in zip(texts, answers, answered):
        before, found, after = (part.strip() for part in text.partition(answer))
        ends = after == decode(run[-1:]) and run[-1] in renderer.ends if after else renderer.end_of_turn() is None
        if not found or before or not ends:
            broken.append(f"{text!r} is trained of the answer {answer!r}")
    rest = "".join(decode(run, clean_up_tokenization_spaces=False) for trained, run in runs if not trained)
    broken += [f"{text!r} is not among what is not trained" for text in said if text not in rest]
    broken += [f"the answer {text!r} is not trained" for text in answers if text in rest]
    prompt = renderer.prompt(messages[:-1])
    first = len(ids) - mask[::-1].index(True) - len(answered[-1])
    if ids[:first][: len(prompt)] != prompt:
        broken.append("the last answer does not follow its prompt")
    return texts, broken


def check(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """Print what is trained; how many rules are broken."""
    renderer, count = ChatRenderer(tokenizer), 0
    ends = tokenizer.convert_ids_to_tokens(sorted(renderer.ends))
    print(f"{name}: an answer ends with {' or '.join(ends)}")
    for messages in conversations():
        shape = f"{sum(m['role'] == 'user' for m in messages)} turns{', system' if SYSTEM in messages else ''}"
        try:
            texts, broken = broken_rules(renderer, messages)
        except ConversationError as error:
            print(f"  {shape}: refused: {error}")
            count += messages[0] != SYSTEM  # a template may refuse a system text
            continue
        print(f"  {shape}: " + " ".join(f"⟦{text}⟧".replace("\n", "\\n") for text in texts))
        for rule in broken:
            print(f"  BROKEN: {rule}")
        count += len(broken)
    for token in (tokenizer.eos_token, *ends):
        typed = [{"role": "user", "content": f"What is {token}?"}, {"role": "assistant", "content": "A token."}]
        try:
            renderer.check_texts(typed)
            print(f"  BROKEN: {token} in a question is taken for text")
            count += 1
        except ConversationError:
            pass
    return count


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="one folder for each tokenizer")
    folder = parser.parse_args().folder
    found = sorted(path.parent for path in folder.glob("*/tokenizer_config.json"))
    if not found:
        raise ValueError(f"FOLDER holds folders with tokenizer_config.json; {folder} has none; pass TOKENIZERS=FOLDER")
    broken = 0
    for path in found:
        tokenizer = load_tokenizer(str(path))
        for template in [None] if tokenizer.chat_template else sorted(file.stem for file in BUNDLED.glob("*.jinja")):
            name = path.name if template is None else f"{path.name}, --chat_template {template}"
            broken += check(load_tokenizer(str(path), template), name)
    print(f"{len(found)} tokenizers, {broken} rules broken")
    return not broken


if __name__ == "__main__":
    sys.exit(exit_status(main))
