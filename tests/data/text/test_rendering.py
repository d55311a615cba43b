"""The trained tokens of a conversation, exactly, for the three template styles."""

from pathlib import Path

import pytest

from draft_heads.data.text.chat_template import load_chat_tokenizer, load_tokenizer, read_chat_template
from draft_heads.data.text.end_tokens import end_token_ids
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from tests.tiny_chat import (
    CHATML,
    LLAMA2,
    STYLES,
    VICUNA,
    byte_tokenizer,
    render_conversation,
    render_prompt,
    template,
    trained_runs,
    word_tokenizer,
)

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello there. 1 2"},
    {"role": "assistant", "content": "I am fine, thank you."},
    {"role": "user", "content": "Hello <s/> again é😀"},
    {"role": "assistant", "content": "12\n\n  34 é😀"},
]
TRAINED = {
    "vicuna": [" I am fine, thank you.</s>", " 12\n\n  34 é😀</s>"],
    "llama2": [" I am fine, thank you. </s>", " 12\n\n  34 é😀 </s>"],
    "chatml": ["I am fine, thank you.<|im_end|>", "12\n\n  34 é😀<|im_end|>"],
}


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "generation block"])
@pytest.mark.parametrize("style", STYLES)
def test_trained_tokens_are_the_answers_and_their_end_of_turn(style, marked):
    tokenizer = byte_tokenizer(template(style, marked))
    ids, mask = render_conversation(tokenizer, CHAT)
    assert trained_runs(tokenizer, ids, mask) == TRAINED[style]


@pytest.mark.parametrize("style", STYLES)
def test_every_answer_begins_where_the_prompt_before_it_ends(style):
    tokenizer = byte_tokenizer(template(style))
    ids, mask = render_conversation(tokenizer, CHAT)
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    assert len(starts) == 2
    for start, turn in zip(starts, (2, 4)):
        assert ids[:start] == render_prompt(tokenizer, CHAT[:turn])


def test_words_of_chatml_token_by_token():
    tokenizer = word_tokenizer(CHATML.replace("[GEN]", "").replace("[END]", ""), "user assistant Hi Hello you . ?")
    chat = [
        {"role": "user", "content": "Hi ?"},
        {"role": "assistant", "content": "Hello you ."},
        {"role": "user", "content": "you ?"},
        {"role": "assistant", "content": "Hi ."},
    ]
    ids, mask = render_conversation(tokenizer, chat)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert [token for token, trained in zip(tokens, mask) if trained] == [
        *["Hello", "you", ".", "<|im_end|>"],
        *["Hi", ".", "<|im_end|>"],
    ]
    assert tokens[mask.index(True) - 2 : mask.index(True)] == ["assistant", "\n"]


def test_a_comment_that_names_a_generation_block_is_none():
    tokenizer = word_tokenizer("{# no {% generation %} here #}" + template("chatml"), "Hi user assistant .")
    _, mask = render_conversation(
        tokenizer, [{"role": "user", "content": "Hi ."}, {"role": "assistant", "content": "Hi"}]
    )
    assert sum(mask) == 2


@pytest.mark.parametrize(
    "block",
    [
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
        "{% generation %}{{ m['content'] + '<|im_end|>\\n' }}{% endgeneration %}",
        "{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}",
    ],
    ids=["end of turn left out", "line break enclosed", "trimmed tags"],
)
def test_generation_block_is_ended_at_the_end_of_turn(block):
    chat_template = CHATML.replace("[GEN]{{ m['content'] | trim + '<|im_end|>' }}[END]{{ '\\n' }}", block)
    assert block in chat_template
    tokenizer = byte_tokenizer(chat_template)
    ids, mask = render_conversation(tokenizer, CHAT)
    assert trained_runs(tokenizer, ids, mask) == TRAINED["chatml"]


@pytest.mark.parametrize("style", ["llama2", "chatml"])
def test_template_that_strips_the_content_keeps_the_mask_exact(style):
    tokenizer = byte_tokenizer(template(style))
    padded = [m | {"content": f" \n{m['content']}\n "} if m["role"] == "assistant" else m for m in CHAT]
    ids, mask = render_conversation(tokenizer, padded)
    assert trained_runs(tokenizer, ids, mask) == TRAINED[style]


def test_answer_equal_to_the_question_is_still_found():
    tokenizer = byte_tokenizer(template("vicuna"))
    same = [{"role": role, "content": "answer"} for role in ("user", "assistant", "user", "assistant")]
    ids, mask = render_conversation(tokenizer, same)
    assert trained_runs(tokenizer, ids, mask) == [" answer</s>"] * 2


def test_trailing_user_turn_is_not_trained():
    tokenizer = byte_tokenizer(template("chatml"))
    ids, mask = render_conversation(tokenizer, CHAT[:4])
    assert trained_runs(tokenizer, ids, mask) == TRAINED["chatml"][:1]


def test_template_without_end_of_turn_trains_the_content_alone():
    tokenizer = byte_tokenizer(VICUNA.replace(" + eos_token", " + '\\n'").replace("[GEN]", "").replace("[END]", ""))
    ids, mask = render_conversation(tokenizer, CHAT)
    assert trained_runs(tokenizer, ids, mask) == [" I am fine, thank you.", " 12\n\n  34 é😀"]


@pytest.mark.parametrize("style", STYLES)
def test_next_turn_continues_the_answers_own_tokens(style):
    tokenizer = byte_tokenizer(template(style))
    ids, mask = render_conversation(tokenizer, CHAT[:3])
    end = len(mask) - mask[::-1].index(True)
    assert ids[:end] + ChatRenderer(tokenizer).next_turn(CHAT[:4]) == render_prompt(tokenizer, CHAT[:4])


def test_a_next_turn_that_begins_with_the_token_that_ended_the_answer_keeps_both():
    """Llama-2's form with a tokenizer whose BOS and EOS are one token."""
    tokenizer = byte_tokenizer(read_chat_template("llama-2"), eos="<s>")
    assert tokenizer.bos_token_id == tokenizer.eos_token_id
    whole = tokenizer.apply_chat_template(CHAT[:4], add_generation_prompt=True, tokenize=True)["input_ids"]
    ids, mask = render_conversation(tokenizer, CHAT[:3])
    end = len(mask) - mask[::-1].index(True)
    assert ids[end - 1] == tokenizer.eos_token_id
    following = ChatRenderer(tokenizer).next_turn(CHAT[:4], ended_by=ids[end - 1])
    assert ids[:end] + following == whole and following[0] == tokenizer.bos_token_id


def test_end_tokens_are_eos_template_and_config():
    tokenizer = byte_tokenizer(template("chatml"))
    assert end_token_ids(tokenizer) == (2, 4)
    assert end_token_ids(tokenizer, [2, 77]) == (2, 4, 77)
    assert end_token_ids(tokenizer, 9) == (2, 4, 9) and end_token_ids(tokenizer, -1) == (2, 4)
    assert end_token_ids(byte_tokenizer(template("llama2"))) == (2,)
    assert end_token_ids(None, 9) == (9,) and end_token_ids(None) == ()


def test_a_template_whose_end_is_no_token_of_the_tokenizer_is_told(caplog):
    tokenizer = byte_tokenizer(template("chatml").replace("<|im_end|>", "<|fin|>"))
    assert end_token_ids(tokenizer) == (2,)
    assert "closes an answer with '<|fin|>', in which the tokenizer" in caplog.text


@pytest.mark.parametrize("last", ["<|end|>", "<|return|>"])
def test_what_ends_a_thought_ends_no_answer(last, caplog):
    """A form of gpt-oss's template closes the last answer, too, with what stands after the analysis."""
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}"
        "{{ '<|start|>assistant analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
        "{{ '<|start|>assistant final<|message|>' + m.content }}"
        f"{{{{ '{last}' if loop.last and not add_generation_prompt else '<|end|>' }}}}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        eos="<|return|>",
    )
    marks = ["<|start|>", "<|message|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    assert end_token_ids(tokenizer) == (tokenizer.convert_tokens_to_ids("<|return|>"),)
    assert ("closes an answer with '<|end|>', as the thought before it" in caplog.text) == (last == "<|end|>")
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Fine."}]
    ids, mask = render_conversation(tokenizer, asked)
    assert trained_runs(tokenizer, ids, mask) == ["Fine." + last]


@pytest.mark.parametrize("prompt, told", [("ASSISTANT: ", True), ("ASSISTANT:", False)])
def test_an_answer_whose_first_token_begins_in_the_prompt_is_told(prompt, told, caplog):
    """Its blank is the prompt's last: after that the target writes a word without one."""
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ 'USER: ' + m.content + ' ' if m.role == 'user' else 'ASSISTANT: ' + m.content + "
        f"eos_token }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )
    first = tokenizer.decode(tokenizer(" Hello", add_special_tokens=False)["input_ids"][:1])
    assert first in " Hello" and first[:1] == " " != first
    renderer = ChatRenderer(tokenizer)
    for _ in range(2):
        ids, mask = renderer.conversation(
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
        )
    assert trained_runs(tokenizer, ids, mask) == [" Hello there.</s>".removeprefix(first if told else "")]
    assert sum(f"within a recorded answer's first token, {first!r}" in line for line in caplog.messages) == told


def test_template_that_shows_no_end_of_turn_leaves_the_other_end_tokens(caplog):
    tokenizer = byte_tokenizer("{{ messages[0]['content'] }}")
    assert end_token_ids(tokenizer, 9) == (2, 9)
    assert "end-of-turn token is unknown: the chat template leaves out the assistant's text" in caplog.text


SIZE = "m['content'] | trim | length | string"


@pytest.mark.parametrize(
    ("content", "end", "told"),
    [
        (SIZE, "", r"leaves out at least 6 characters of assistant turn 2, .*labels generate"),
        (
            f"(m['content'] | trim if loop.last else {SIZE})",
            "",
            r"leaves out the assistant's text .*\(assistant turn 1\)",
        ),
        (
            "m['content'] | trim",
            "{{ messages | map(attribute='content') | join | length }}",
            r"rewrites more than the text of assistant turn 1.*\{% generation %\}",
        ),
    ],
)
def test_rewriting_template_is_refused_with_the_remedy(content, end, told):
    tokenizer = byte_tokenizer(template("chatml").replace("m['content'] | trim", content) + end)
    with pytest.raises(ConversationError, match=told):
        render_conversation(tokenizer, CHAT)


@pytest.mark.parametrize(
    ("chat_template", "found"),
    [
        (
            "{% generation %}{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}",
            "every",
        ),
        ("{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}", "no"),
    ],
)
def test_mask_of_all_or_nothing_is_an_error(chat_template, found):
    with pytest.raises(ConversationError, match=f"^{found} token .* check that"):
        render_conversation(byte_tokenizer(chat_template), CHAT)


def test_template_that_refuses_a_role_is_reported():
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + LLAMA2
    tokenizer = byte_tokenizer(refusing.replace("[GEN]", "").replace("[END]", ""))
    with pytest.raises(ConversationError, match=r"refuses the conversation \(roles .*system.*no system"):
        render_conversation(tokenizer, CHAT)


def test_vicuna_template_for_checkpoints_without_one():
    tokenizer = byte_tokenizer(read_chat_template("vicuna"))
    ids, mask = render_conversation(tokenizer, CHAT)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<s>Be kind. USER: Hello there. 1 2 ASSISTANT: I am fine, thank you.</s>"
        "USER: Hello <s/> again é😀 ASSISTANT: 12\n\n  34 é😀</s>"
    )
    assert trained_runs(tokenizer, ids, mask) == TRAINED["vicuna"]
    default = tokenizer.decode(render_prompt(tokenizer, CHAT[1:2]), skip_special_tokens=False)
    assert default.startswith("<s>A chat between a curious user and an artificial intelligence assistant. ")
    assert default.endswith("answers to the user's questions. USER: Hello there. 1 2 ASSISTANT:")


def test_tokenizer_without_template_is_refused_with_the_remedy():
    tokenizer = byte_tokenizer(template("chatml"))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="pass as chat_template the one the target was trained on"):
        render_prompt(tokenizer, CHAT)


def test_chat_template_is_a_bundled_name_from_any_folder_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text(CHATML)
    assert read_chat_template("own.jinja") == CHATML
    assert "ASSISTANT:" in read_chat_template("vicuna")
    with pytest.raises(ValueError, match=r"^chat_template nobody is neither a file nor .* one of .*vicuna"):
        read_chat_template("nobody")


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "generation block"])
@pytest.mark.parametrize("style", STYLES)
def test_a_turn_that_is_not_to_be_trained_on_is_rendered_and_not_trained(style, marked):
    tokenizer = byte_tokenizer(template(style, marked))
    chat = [CHAT[0], CHAT[1], {**CHAT[2], "trained": False}, CHAT[3], {**CHAT[4], "trained": True}]
    ids, mask = render_conversation(tokenizer, chat)
    assert ids == render_conversation(tokenizer, CHAT)[0]
    assert trained_runs(tokenizer, ids, mask) == TRAINED[style][1:]
    with pytest.raises(ConversationError, match="no assistant turn is to be trained on; leave"):
        render_conversation(tokenizer, chat[:4])


def test_further_keys_and_arguments_reach_the_template():
    own = "{{ tools | length ~ 'tools' if tools else '' }}" + template("chatml").replace(
        "m['content'] | trim", "m['content'] + m['name'] + ('trained' if 'trained' in m else '')"
    )
    tokenizer = byte_tokenizer(own)
    chat = [CHAT[1], {**CHAT[2], "name": " Bo.", "trained": True}]
    ids, mask = render_conversation(tokenizer, chat, {"tools": [{"type": "function"}] * 2})
    assert tokenizer.decode(ids).startswith("2tools<|im_start|>")
    assert trained_runs(tokenizer, ids, mask) == ["I am fine, thank you. Bo.<|im_end|>"]
    assert tokenizer.decode(render_prompt(tokenizer, chat[:1], {"tools": [{}]})).startswith("1tools<|im_start|>")


def test_a_chat_template_file_is_read_whole_or_refused(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_bytes(b"\xef\xbb\xbf" + CHATML.encode())  # some editors put this mark in front
    assert read_chat_template(str(file)) == CHATML
    for empty in (b"", b" \n", b"\xef\xbb\xbf"):
        file.write_bytes(empty)
        with pytest.raises(ValueError, match=r"^chat_template .*own.jinja is empty; pass a file with a chat template"):
            load_tokenizer("data/tiny_target", str(file))
    file.write_bytes(CHATML.encode("utf-16"))
    with pytest.raises(ValueError, match=r"is a text in UTF-8; this file has other bytes at 0; save it"):
        load_chat_tokenizer("data/tiny_target", str(file))


@pytest.mark.parametrize(("load", "option"), [(load_tokenizer, "--target"), (load_chat_tokenizer, "--tokenizer")])
def test_a_folder_without_a_tokenizer_is_named_with_its_option(tmp_path, load, option):
    (tmp_path / "config.json").write_bytes(Path("tests/tiny_target/config.json").read_bytes())
    with pytest.raises(ValueError, match=rf"^{option} .* is no tokenizer's folder or hub id \(.*tokenizer\.json$"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "bos"), [("vicuna", "<s>"), ("vicuna", "</s>"), ("vicuna", None), ("llama-2", "<s>"), ("llama-2", "</s>")]
)
def test_bundled_templates_with_any_bos(name, bos):
    tokenizer = byte_tokenizer(read_chat_template(name))
    tokenizer.bos_token = bos
    ids, mask = render_conversation(tokenizer, CHAT)
    assert trained_runs(tokenizer, ids, mask) == TRAINED[name.replace("-", "")]
    assert tokenizer.decode(ids).startswith(bos or "Be kind.")


def test_a_further_argument_with_a_name_of_the_rendering_itself_is_refused():
    tokenizer = byte_tokenizer(template("chatml"))
    with pytest.raises(ConversationError, match="got tokenize; leave it out"):
        render_prompt(tokenizer, CHAT[:2], {"tokenize": False})


THINKS = (
    "{% set last = namespace(question=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set last.question = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ '<think>' + m.thinking + '</think>' if m.thinking and loop.index0 > last.question }}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)
RULES_AT_THE_LAST = (  # as Mistral's, which shows a system text with the question that ends the conversation
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' }}"
    "{{ messages[0].content + '\\n\\n' if loop.last and messages[0].role == 'system' }}{{ m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)


def test_a_question_without_an_answer_does_not_make_the_last_answer_an_earlier_one():
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut", "thinking": "French?"}
    renderer = ChatRenderer(byte_tokenizer(THINKS))
    for chat in ([user, answer], [user, answer, {"role": "user", "content": "Why?"}]):
        ids, mask = renderer.conversation(chat)
        assert trained_runs(renderer.tokenizer, ids, mask) == ["<think>French?</think>Salut<|im_end|>"]
        assert "Why?" not in renderer.tokenizer.decode(ids) and not renderer.shortened(chat)
    plain = ChatRenderer(byte_tokenizer(template("chatml")))  # renders answers alike wherever they are
    ids, _ = plain.conversation([user, {"role": "assistant", "content": "Salut"}, {"role": "user", "content": "Why?"}])
    assert plain.tokenizer.decode(ids).endswith("<|im_start|>user\nWhy?<|im_end|>\n")
    renderer = ChatRenderer(byte_tokenizer(RULES_AT_THE_LAST))
    chat = [{"role": "system", "content": "Rhyme."}, user, {"role": "assistant", "content": "Salut"}]
    for turns in (chat, [*chat, {"role": "user", "content": "Why?"}]):
        with pytest.raises(ConversationError, match="leaves out the system's text"):
            renderer.conversation(turns)


@pytest.mark.parametrize(("opens", "written"), [("<think>\n", "\n</think>\n\n"), ("", "<think>\n\n</think>\n\n")])
def test_an_empty_thought_before_a_recorded_answer_is_told_once(opens, written, caplog):
    """Qwen3's forms: the prompt opens the thought, or the target does, and the template closes it for the answer."""
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n{opens}' }}}}"
        "{% if enable_thinking is false %}{{ '" + written + "' }}{% endif %}{% endif %}"
    )
    asked, answer = {"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "4."}
    renderer = ChatRenderer(tokenizer)
    renderer.conversation([asked, answer | {"reasoning_content": "A sum."}])
    renderer.conversation([asked, answer], {"enable_thinking": False})  # the prompt has it
    assert not caplog.messages
    for _ in range(2):
        ids, mask = renderer.conversation([asked, answer])
    assert trained_runs(tokenizer, ids, mask) == ["4.<|im_end|>"]
    (told,) = caplog.messages
    assert f"the chat template writes {written!r} before a recorded answer without thoughts" in told
