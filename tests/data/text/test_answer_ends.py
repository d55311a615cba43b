"""Which tokens end an answer, and what closes it before them: in labels, in later prompts and in streams."""

import pytest

from draft_heads.data.text.end_tokens import end_token_ids
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.generation import TextPieces
from tests.data.text.test_chat_forms import SYSTEM
from tests.data.text.test_row_keys import ANSWER, USER
from tests.data.text.test_template_probe import own_target
from tests.tiny_chat import byte_tokenizer, template, trained_runs


@pytest.mark.parametrize("closing", ["<|im_end|>", "<|im_end|>response<|im_start|><|im_end|>message<|im_start|>"])
def test_all_that_closes_an_answer_is_trained_and_no_later_prompt_has_it_twice(closing):
    """As where a mark closes thoughts too, so that the target does not stop at it (HyperCLOVA X, Kimi K3)."""
    thought = "{% if m.thinking %}{{ m.thinking + '<|im_end|><|im_start|>assistant\n' }}{% endif %}"
    answers = template("chatml").replace("'<|im_end|>'", f"'{closing}</s>'")
    tokenizer = byte_tokenizer(answers.replace("{{ m['content'] | trim", thought + "{{ m['content'] | trim"))
    target = own_target(tokenizer)
    renderer = target.renderer
    assert target.end_token_ids == (2,)
    asked, answer, question = [USER], ANSWER, USER
    text = answer["content"]
    ids, mask = renderer.conversation([*asked, answer])[:2]
    assert trained_runs(tokenizer, ids, mask) == [f"{text}{closing}</s>"]
    first, *_ = renderer.spans([*asked, answer, question, answer])[2].values()
    said, marks = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (text, closing))
    assert ids[slice(*first)] == [*said, *marks, 2]
    for behind in ([*marks[:count]] for count in range(len(marks) + 1)):  # also of an answer that the limit cuts
        for end in ([], [2]):
            assert target.answer_text([*said, *behind, *end]) == text
        pieces = TextPieces(tokenizer, form=target.answer_form)
        assert pieces.add([*said, *behind]) + pieces.end() == text
        pieces = TextPieces(tokenizer, form=target.answer_form)
        other = tokenizer(" so", add_special_tokens=False)["input_ids"]
        assert pieces.add([*said, *marks, *other]) + pieces.end() == f"{text}{closing} so"
    prompt = renderer.prompt(asked) + [*said, *marks, 2] + renderer.next_turn([*asked, answer, question])
    assert prompt == renderer.prompt([*asked, answer, question])


@pytest.mark.parametrize("system", [True, False])
def test_a_template_that_wants_a_system_text_is_looked_through_with_one(system):
    """GLM's form, in which the next role ends a turn, and ChatML, whose end is no other's."""
    asks = "{% if messages[0].role != 'system' %}{{ raise_exception('no system text') }}{% endif %}" if system else ""
    glm = asks + "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    glm += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    tokenizer = byte_tokenizer(glm)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    ids, mask = ChatRenderer(tokenizer).conversation([*SYSTEM, USER, ANSWER, USER, ANSWER])
    assert trained_runs(tokenizer, ids, mask) == ["Salut", "Salut"]
    assert end_token_ids(byte_tokenizer(asks + template("chatml"))) == (2, 4)


def test_the_mark_that_closes_every_answer_but_the_last_ends_answers():
    """Qwen 1.5's form and Yi's, under a tokenizer with another end."""
    closes = "| trim + '<|im_end|>' }}", "| trim }}{% if not loop.last or add_generation_prompt %}<|im_end|>{% endif %}"
    tokenizer = byte_tokenizer(template("chatml").replace(*closes))
    assert tokenizer.apply_chat_template([USER, ANSWER], tokenize=False).endswith("Salut\n")
    assert end_token_ids(tokenizer) == (2, 4)
