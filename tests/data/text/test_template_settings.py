"""Settings that a chat template reads, given with its name: `own,enable_thinking=false`."""

import json
from contextlib import nullcontext
from functools import partial

import pytest

from draft_heads.data.text.chat_template import (
    load_chat_tokenizer,
    load_tokenizer,
    reads_setting,
    split_settings,
    tell_of_the_date,
    template_variables,
    without_date,
)
from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.target.loading import target_tokenizer
from tests.tiny_chat import byte_tokenizer, template

CHATML = template("chatml")
THINKS = CHATML + (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' ~ style }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "Hello there."}]


def with_template(tmp_path, source):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = source
    tokenizer.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def prompt(tokenizer, **given):
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False, **given)


@pytest.mark.parametrize("form", ["own", "file", "several", "at a line's end"])
@pytest.mark.parametrize(
    ("style", "value"),
    [('sh"ort', 'sh"ort'), ('"no"', "no"), ("3", 3), ("true", True), ("null", None), ('"3"', "3"), ("é😀", "é😀")],
)
def test_settings_of_a_chat_template_are_those_that_it_would_be_given(tmp_path, form, style, value):
    source = "\n" + THINKS if form == "at a line's end" else THINKS
    folder = with_template(tmp_path, {"default": source, "tool_use": source} if form == "several" else source)
    (tmp_path / "mine.jinja").write_text(THINKS)
    expected = prompt(load_tokenizer(folder), enable_thinking=False, style=value)
    assert expected.endswith(f"<think></think>{value}")
    name = f"{tmp_path}/mine.jinja" if form == "file" else "own"
    for load in (partial(target_tokenizer, adapter=None), load_chat_tokenizer):
        loaded = load(folder, f"{name},enable_thinking=false,style={style}")
        assert prompt(loaded) == expected
        texts = loaded.chat_template.values() if form == "several" else [loaded.chat_template]
        assert all("style" not in template_variables(text) for text in texts)
        turned = load(folder, f"{name},style={style},enable_thinking=false")
        assert turned.chat_template == loaded.chat_template


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("own,thinking=false", "does not read 'thinking', but enable_thinking, style; leave it out"),
        ("own,messages=1", "does not read 'messages', but enable_thinking, style"),
        ("own,range=1", "does not read 'range'"),
        ("own,style", "takes settings as name=value, each once; got 'style' in own,style; write for example own,"),
        ("own,style=1,style=2", "each once; got 'style=2'"),
        (r'own,style="\d"', "in quotes is a text as in JSON; got style=.*; repair it"),
        ('own,style="a" b', "in quotes is a text as in JSON"),
        ("x" * 300, "is neither a file nor a bundled template"),
        ("own,", "as name=value, each once; got '' in own,; write"),
        ("own,enable_thinking=False", "enable_thinking as true or false; got enable_thinking=False; write for example"),
        ("own,enable_thinking=0", "as true or false; got enable_thinking=0"),
        ("own,style=no", "switches as true or false; got style=no; .* or a word that looks so in quotes"),
        ("own,style=None", "written as in JSON, switches as true or false; got style=None"),
        ("own,style=[1]", r"a word, a number, true or false; got style=\[1\]"),
        ("own,style=1e999", "a word, a number, true or false; got style=1e999"),
        ("own,style=NaN", "a word, a number, true or false; got style=NaN"),
        ("vicuna,enable_thinking=false", "does not read 'enable_thinking', but "),
        ("nobody,style=1", "chat_template nobody is neither a file nor a bundled template"),
    ],
)
def test_a_setting_that_a_chat_template_does_not_read_is_refused(tmp_path, given, told):
    folder = with_template(tmp_path, THINKS)
    for load in (partial(target_tokenizer, adapter=None), load_chat_tokenizer):
        with pytest.raises(ValueError, match=told):
            load(folder, given)


@pytest.mark.parametrize(
    ("given", "asked", "fits"),
    [
        ("own,enable_thinking=false", {"enable_thinking": False}, True),
        ("own,enable_thinking=false", {"enable_thinking": True}, False),
        ("own,enable_thinking=true", {"enable_thinking": False}, False),
        ("own,enable_thinking=true", {"thinking": False}, False),
        ("own,enable_thinking=false", {"thinking": False}, True),
        ("own,style=x", {"thinking": False}, False),
        ("own,style=x", {"enable_thinking": True}, True),
        ("own,enable_thinking=true", {"style": "x"}, True),
        ("own,style=x", {"style": "y"}, False),
    ],
)
def test_a_conversation_that_asks_for_another_setting_is_refused(tmp_path, given, asked, fits):
    renderer = ChatRenderer(target_tokenizer(with_template(tmp_path, THINKS), given, None), (2,))
    with nullcontext() if fits else pytest.raises(ConversationError, match=f"does not read '{next(iter(asked))}'"):
        renderer.prompt(QUESTION, asked)


@pytest.mark.parametrize(
    ("form", "asks"),
    [
        ("{{ '<think>' if add_generation_prompt }}", {"enable_thinking": False}),  # always thinks
        ("{{ '<think>' if add_generation_prompt }}", {"thinking": False}),
        ("{{ 'Reasoning: ' ~ reasoning_effort | default('medium') }}", {"enable_thinking": False}),
        ("{{ '<think></think>' if add_generation_prompt and not enable_thinking }}", {"thinking": False}),
        ("{{ '<|inner_prefix|>' if add_generation_prompt }}", {"enable_thinking": False}),
        ("{{ 'Strength: ' ~ reasoning_strength if reasoning_strength }}", {"enable_thinking": False}),
        ("{% for m in messages %}{{ m.reasoning_content or '' }}{% endfor %}", {"thinking": False}),
    ],
)
def test_a_template_that_thinks_anyway_refuses_rows_that_ask_for_no_thoughts(form, asks):
    render = ChatRenderer(byte_tokenizer(CHATML + form), (2,))
    with pytest.raises(ConversationError, match=f"does not read '{next(iter(asks))}'"):
        render.prompt(QUESTION, asks)
    assert ChatRenderer(byte_tokenizer(CHATML), (2,)).prompt(QUESTION, asks)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ('own,style="You are Bob, a bot.",n=2', {"style": "You are Bob, a bot.", "n": 2}),
        (r'own,style="a \"b, c\" d"', {"style": 'a "b, c" d'}),
        ('own,style=""', {"style": ""}),
        ('own,style="a,\nb"', {"style": "a,\nb"}),
        (f"own,style={'x' * 300}", {"style": "x" * 300}),
        ('own,style=say "a"', {"style": 'say "a"'}),
    ],
)
def test_settings_may_be_long_and_have_commas_in_quotes(given, settings):
    assert split_settings(given) == (None, settings)


def test_a_processors_json_is_read_for_the_template_in_it(tmp_path):
    """One with single quotes alone would compile as it is, and write its braces into every prompt."""
    folder, file = with_template(tmp_path, THINKS), tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": CHATML}))
    assert target_tokenizer(folder, str(file), None).chat_template == CHATML
    for wrong in ({"processor_class": "A"}, {"chat_template": [{"name": "default", "template": CHATML}]}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"json is JSON without a text under chat_template; pass .* \.jinja file"):
            target_tokenizer(folder, str(file), None)


def test_a_file_with_a_comma_in_its_name_is_a_file(tmp_path):
    folder, file = with_template(tmp_path, CHATML), tmp_path / "mine,style=1"
    file.write_text(THINKS)
    assert target_tokenizer(folder, str(file), None).chat_template == THINKS


def test_the_own_template_of_a_target_with_an_adapter_is_the_adapters(tmp_path):
    folder = with_template(tmp_path, CHATML)
    adapter = with_template(tmp_path / "adapter", THINKS)
    assert prompt(target_tokenizer(folder, "own,enable_thinking=false,style=x", adapter)).endswith("<think></think>x")


def test_a_row_asks_for_a_setting_whatever_the_date(tmp_path):
    """`without_date` writes a line before those of the settings."""
    folder = with_template(tmp_path, "{{ strftime_now('%d') }}" + THINKS)
    undated = without_date(target_tokenizer(folder, "own,style=x", None))
    assert reads_setting(undated.chat_template, "style", "x") and not reads_setting(undated.chat_template, "style", "y")


def test_a_template_that_was_made_to_reason_knows_thoughts():
    made = '{% set reasoning_effort = "high" %}\n{{ reasoning_effort }}'
    assert not reads_setting(made, "enable_thinking", False) and reads_setting("", "enable_thinking", False)


def test_a_date_that_is_set_is_not_todays(tmp_path, caplog):
    dated = CHATML + "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b') %}{% endif %}"
    folder = with_template(tmp_path, dated + "{{ date_string }}")
    tell_of_the_date(target_tokenizer(folder, "own,date_string=26 Jul 2024", None), "rows differ")
    assert not caplog.messages
    tell_of_the_date(target_tokenizer(folder, None, None), "rows differ")
    assert "writes the date into prompts: rows differ" in caplog.text
