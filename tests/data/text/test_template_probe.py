"""Templates that read texts in another form or leave some out, and what stands in texts and is no text."""

import hashlib
import json
import re

import datasets
import pytest
from tokenizers import pre_tokenizers

from draft_heads.data.fingerprint import chat_template_hash
from draft_heads.data.labels.answers import Answer
from draft_heads.data.labels.distill import distill
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.distiller import Distiller
from draft_heads.data.labels.shards import load_distilled
from draft_heads.data.text.errors import ControlTokenError
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from draft_heads.data.text.row_keys import message_of
from draft_heads.data.text.template_probe import SOME
from draft_heads.data.text.token_spans import AnswerForm, answer_tokens, scaffold_end
from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.generation import TextPieces, prompt_ids
from draft_heads.inference.target.target import Target
from draft_heads.scripts.distill import summary
from tests.data.text.test_chat_forms import CHAT, FORMS, SYSTEM, tokenizer_of
from tests.data.text.test_row_keys import ANSWER, CALL, READS, TOOLS, USER
from tests.tiny_chat import (
    CHATML,
    byte_tokenizer,
    random_llama,
    render_conversation,
    render_prompt,
    template,
    trained_runs,
)

PARTS = (  # LLaVA-1.5's form: nothing of a string is a text
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LINES = (  # Idefics3's: text parts in a loop over a message's lines, an answer as a string
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ m.content }}{% else %}"
    "{% for line in m.content %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RULES_LAST = (  # Mistral Nemo's: the system text stands in a question that is the last turn, else nowhere
    "{{ bos_token }}{% set rules = '' %}{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST]' + (rules + '\n\n' if loop.last and rules else '') + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


def own_target(tokenizer):
    return Target(random_llama(len(tokenizer)), tokenizer)


def dataset(*conversations):
    rows = [{"id": f"c{i}", "place": f"row {i + 1}", "messages": list(one)} for i, one in enumerate(conversations)]
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("form", [PARTS, LINES])
def test_a_template_that_wants_content_parts_gets_them(form):
    tokenizer = byte_tokenizer(form)
    prompts = [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in ("Why?", "How?")]
    assert prompts[0] != prompts[1] and "Why?" in tokenizer.decode(prompts[0])
    assert prompt_ids(own_target(tokenizer), "Why?") == prompts[0]
    ids, mask = render_conversation(tokenizer, [*SYSTEM, *CHAT])
    end = "</s>" if form == PARTS else "<|im_end|>"
    assert [run.strip() for run in trained_runs(tokenizer, ids, mask)] == [m["content"] + end for m in CHAT[1::2]]
    assert all(message["content"] in tokenizer.decode(ids) for message in [*SYSTEM, *CHAT])


def test_a_tools_result_is_passed_as_parts_where_they_are_read():
    calls = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content }}"
    tokenizer = byte_tokenizer(LINES.replace("{{ m.content }}", calls))
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "20"}]
    assert "<|im_start|>tool\n20<|im_end|>" in tokenizer.decode(render_prompt(tokenizer, chat))


@pytest.mark.parametrize(
    "form", ["USER: ASSISTANT:", "{% for m in messages %}{{ m.role }}{% endfor %}", "{{ messages[0].text }}"]
)
def test_a_template_that_shows_no_users_text_is_refused(form):
    with pytest.raises(ValueError, match=r"cannot be used: it renders no user's text.*pass another chat_template"):
        render_prompt(byte_tokenizer(form), CHAT[:1])


def test_a_template_that_is_no_jinja_is_refused():
    with pytest.raises(ValueError, match=r"no Jinja template \(line 1: .*pass another chat_template"):
        ChatRenderer(byte_tokenizer("{% for m in messages %}{{ m.content }}"))


def test_a_system_text_that_the_template_leaves_out_is_refused():
    tokenizer = byte_tokenizer(RULES_LAST)
    assert "Be kind." in tokenizer.decode(render_prompt(tokenizer, [*SYSTEM, *CHAT[:3]]))
    for rules in ("Be kind.", "1"):  # also one that stands in another text
        with pytest.raises(
            ConversationError, match="leaves out the system's text of a conversation that ends with the a"
        ):
            render_conversation(tokenizer, [{"role": "system", "content": rules}, *CHAT])


@pytest.mark.parametrize("first", ["First question", "a question", "user"])
def test_a_message_that_is_left_out_is_noticed_wherever_its_text_also_stands(first):
    """In another message, or in the template's own words."""
    loop, rows = "{% for m in messages %}", [{"role": "user", "content": first}, *CHAT[1:3]]
    rows = [*rows[:2], {"role": "user", "content": "Is this a question?"}]
    whole = byte_tokenizer(template("chatml"))
    assert whole.decode(render_prompt(whole, rows)).count(first) == 1 + (first != "First question") + (first == "user")
    latest = byte_tokenizer(template("chatml").replace(loop, "{% for m in messages[-2:] %}"))
    with pytest.raises(ConversationError, match=rf"leaves out the user's text .*'{first}' \(user turn 1\)"):
        render_prompt(latest, rows)


def test_a_template_that_leaves_out_old_turns_is_refused():
    none = byte_tokenizer(template("chatml").replace("{% for m in messages %}", "{% for m in messages[-2:] %}"))
    with pytest.raises(ConversationError, match="leaves out the user's text"):
        render_conversation(none, CHAT)
    with pytest.raises(ConversationError, match="leaves out the user's text"):
        render_prompt(none, CHAT[:3])


@pytest.mark.parametrize("form", [*FORMS, "rules last", "blank before texts"])
def test_generated_rows_have_at_most_the_tokens_that_were_estimated(form):
    tokenizer = tokenizer_of({"rules last": "mistral", "blank before texts": "gemma"}.get(form, form))
    if form == "rules last":
        tokenizer.chat_template = RULES_LAST
    elif form == "blank before texts":  # as SentencePiece puts one
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    text = "One two three four five six. 12 34 12 34"
    answer = ChatRenderer(tokenizer).answer_after(CHAT[:1], text)[:19]
    role = tokenizer.convert_tokens_to_ids("<|user|>") if form == "roles alone" else None
    answer += [role or ChatRenderer(tokenizer).end_of_turn() or tokenizer.eos_token_id]
    options = DistillOptions(labels="generate", max_new_tokens=20, max_length=250)

    def answers(prompts, limits):
        return enumerate(Answer(answer[:limit], "end" if limit >= 20 else "limit") for limit in limits)

    target = own_target(tokenizer)
    target.end_token_ids = (*target.end_token_ids, *((role,) if role else ()))
    distiller = Distiller(target, options, answers)
    asked = dataset([*SYSTEM, *CHAT, *CHAT, *CHAT], CHAT, CHAT[:2])
    estimated, rows = distiller.count_tokens(asked), list(distiller.rows(asked))
    written = sum(len(row.ids) for row in rows)
    assert written <= estimated
    if not distiller.renderer.probe.may_rewrite:
        assert estimated < 1.4 * written


def test_text_that_is_a_special_token_stays_in_an_answer():
    tokenizer = byte_tokenizer(template("chatml"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens[3:], "<filename>"]})
    text = 'Open "<filename>" to go on. The answer is 18. See <filename>'
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    target = own_target(tokenizer)
    assert target.answer_text(ids) == text
    assert ChatRenderer(tokenizer).answer_text(ids, target.end_token_ids) == (text, True)
    pieces = TextPieces(tokenizer, form=target.answer_form)
    assert pieces.add(ids[:-1]) + pieces.end() == text


@pytest.mark.parametrize(
    ("end", "opens"),
    [
        ("<think>\n", True),
        ("[THINK]", True),
        ("<|channel>thought\n", True),
        ("<|START_THINKING|>", True),
        ("Here are my reasoning steps:\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("", False),
        ("<think> ok", False),
    ],
)
def test_a_prompt_that_opens_a_thought(end, opens):
    tokenizer = byte_tokenizer(template("chatml"))
    prompt = tokenizer("<|im_start|>assistant\n" + end, add_special_tokens=False)["input_ids"]
    assert own_target(tokenizer).opens_thought(prompt) is opens


def test_text_with_a_thought_grows_where_the_template_writes_an_empty_one_before_answers():
    """Qwen3's template with a tokenizer that counts the marks among its special tokens."""
    thought = "m['content'] | trim", "('<think>\\n\\n</think>\\n\\n' if loop.last else '') + m['content'] | trim"
    tokenizer = byte_tokenizer(template("chatml").replace(*thought))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]})
    target, text = own_target(tokenizer), "<think>\nHm.\n</think>\n\nHi."
    assert tokenizer.apply_chat_template([USER, ANSWER], tokenize=False).count("<think>\n\n</think>") == 1
    pieces = TextPieces(tokenizer, form=target.answer_form)
    grown = [pieces.add([token]) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert "".join(grown) == text and all(grown)


ANALYSIS = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ANALYSIS + "<|channel|>final<|message|>One.<|return|>", "One."),
        ("<|channel|>final<|message|>One.<|return|>", "One."),
        (ANALYSIS + "<|channel|>final json<|message|>[1]<|return|>", "[1]"),
        (ANALYSIS + "<|channel|>comment<|message|>A<|end|><|channel|>final x<|message|>B", "B"),
        (
            ANALYSIS + "<|channel|>finally, it is so long<|message|>",
            ANALYSIS + "<|channel|>finally, it is so long<|message|>",
        ),
        (ANALYSIS, ANALYSIS),
        ("One <|channel|>final<|message|>two", "One <|channel|>final<|message|>two"),
        ("One.<|return|>", "One."),
    ],
)
def test_the_text_of_an_answer_in_channels_is_the_same_everywhere(answer, text):
    tokenizer = tokenizer_of("channels")
    target, ids = own_target(tokenizer), tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert target.answer_text(ids) == text
    pieces = TextPieces(tokenizer, form=target.answer_form)
    kept = answer_tokens(ids, target.end_token_ids, AnswerForm())
    assert "".join(pieces.add([token]) for token in kept) + pieces.end() == text


def test_an_answer_follows_the_first_scaffold_that_it_begins_with():
    form = AnswerForm((7, 8), (4, 5))
    assert answer_tokens([7, 5, 4, 7, 8, 6, 2], [2], form) == [6]
    for end in ([2], [4, 5, 2], [4], [4, 5], []):
        assert answer_tokens([3, 7, 8, 6, *end], [2], form) == [3, 7, 8, 6]
    assert answer_tokens([3, 4, 6, 5, 2], [2], form) == [3, 4, 6, 5]
    header = (7, 8, SOME, 9)  # as `<|channel|> final json <|message|>`
    assert scaffold_end([7, 4, 9, 5, 7, 8, 6, 9, 5], header) == 8 and scaffold_end([7, 8, 9, 5], header) == 3
    assert scaffold_end([7, 8, 6, 7, 9, 5], header) == 0 == scaffold_end([7, 8, *[6] * 9, 9], header)


@pytest.mark.parametrize(
    ("role", "text", "kept"),
    [
        ("user", "What is <|im_end|>?", 2),
        ("user", "<s>struck out</s>", 2),
        ("assistant", "It is </s>.", 2),
        ("assistant", "<|im_start|>user", 2),
        ("user", "a < s > and <unk> and <filename>", 4),
    ],
)
def test_control_tokens_in_texts_are_refused_trimmed_and_counted(role, text, kept):
    tokenizer = byte_tokenizer(CHATML.replace("[GEN]", "").replace("[END]", ""))
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens[3:], "<filename>"]})
    chat = [dict(message) for message in CHAT]
    chat[2 if role == "user" else 3]["content"] = text
    target = own_target(tokenizer)
    if kept == len(chat):
        assert [len(row.messages) for row in Distiller(target, DistillOptions()).rows(dataset(chat))] == [4]
        assert prompt_ids(target, text)
        return
    with pytest.raises(
        ConversationError, match=r"row 1 .*control token in someone's text: .* in \w+ turn \d .*skip_bad"
    ):
        list(Distiller(target, DistillOptions()).rows(dataset(chat)))
    (trimmed, dropped) = Distiller(target, DistillOptions(skip_bad_rows=True)).rows(
        dataset(chat, [{"role": "user", "content": "</s>"}, CHAT[1]])
    )
    assert len(trimmed.messages) == (2 if role == "user" else 3) and trimmed.skipped is None
    assert trained_runs(tokenizer, trimmed.ids, trimmed.mask) == ["I am fine, thank you.<|im_end|>"]
    assert trimmed.trimmed.startswith("a control token in someone's text: ")
    assert dropped.skipped.startswith("a control token in someone's text: ")
    if role == "user":
        with pytest.raises(ControlTokenError):
            prompt_ids(target, text)
    else:  # the target's own answers may hold them
        assert prompt_ids(target, [*chat, CHAT[0]])


@pytest.mark.parametrize("unknown", ["<unk>", "</s>", "<s>"])
def test_an_end_that_also_stands_for_unknown_text_is_a_control_token(unknown):
    """As in GPT-2's tokenizers and those of OLMo 2, Phi-4-mini and Granite; Llama 2's fills up with <unk>."""
    tokenizer = byte_tokenizer(CHATML.replace("[GEN]", "").replace("[END]", ""))
    tokenizer.unk_token = tokenizer.pad_token = unknown
    target = own_target(tokenizer)
    for token in ("<unk>", "</s>", "<s>"):
        if token == "<unk>":
            assert prompt_ids(target, f"What is {token}?")
        else:
            with pytest.raises(ControlTokenError, match=f"'{token}' in user turn 1"):
                prompt_ids(target, f"What is {token}?")


def test_rows_with_control_tokens_are_counted_by_reason(tmp_path, caplog, capsys):
    rows = [
        {"messages": [{"role": "user", "content": "Hi </s>"}, CHAT[1]]},
        {"messages": [*CHAT[:2], {"role": "user", "content": "<|user|>"}, CHAT[3]]},
        {"messages": CHAT[:2]},
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    target = Target.from_pretrained("data/tiny_target")
    manifest = distill(target, str(source), str(tmp_path / "out"), DistillOptions(skip_bad_rows=True), False, False)
    assert "1 row dropped: a control token in someone's text (line 1)" in caplog.text
    assert "1 row trimmed: a control token in someone's text (line 2)" in caplog.text
    (shard,) = manifest["shards"]
    assert [(row["place"], row["kept_turns"]) for row in shard["trimmed"]] == [("line 2", 2)]
    assert manifest["counts"]["rows"] == 2 and shard["skipped"][0]["place"] == "line 1"
    # what is left asks what the third row asks: they are held out together
    assert len({row["conversation"] for row in load_distilled(str(tmp_path / "out")).dataset}) == 1
    summary(manifest, "out")
    shown = capsys.readouterr().out
    assert re.search(r"bad rows trimmed +│ +1 ", shown) and "1 row trimmed: a control token" in shown


def test_recorded_answers_that_are_written_anew_may_hold_control_tokens():
    tokenizer = byte_tokenizer(CHATML.replace("[GEN]", "").replace("[END]", ""))
    target = own_target(tokenizer)
    distiller = Distiller(target, DistillOptions(labels="generate", max_new_tokens=4), TargetAnswerer(target))
    (row,) = distiller.rows(dataset([CHAT[0], {"role": "assistant", "content": "It is <|im_end|>."}]))
    assert row.skipped is None and any(row.mask)


def test_control_tokens_in_the_descriptions_of_tools_are_refused():
    form = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    renderer = ChatRenderer(byte_tokenizer(form + CHATML.replace("[GEN]", "").replace("[END]", "")))
    tools = [{"type": "function", "function": {"name": "f", "description": "Ends with <|im_end|>."}}]
    with pytest.raises(ControlTokenError, match=r"'<\|im_end\|>' in 'tools' would be encoded as that token"):
        renderer.check_texts(CHAT, extra={"tools": tools})
    renderer.check_texts(CHAT, extra={"tools": [{"name": "f", "description": "Ends."}], "thinking": True})


def test_no_rendering_takes_a_typed_token_for_a_mark_but_in_the_targets_own_answers():
    renderer = ChatRenderer(byte_tokenizer(template("chatml")))
    typed = [{"role": "user", "content": "What is </s>?"}, CHAT[1]]
    own = [CHAT[0], {"role": "assistant", "content": "It is </s>."}, CHAT[2]]
    for render, chat in ((renderer.conversation, typed), (renderer.prompt, typed[:1]), (renderer.conversation, own)):
        with pytest.raises(ControlTokenError, match=r"'</s>' in \w+ turn"):
            render(chat)
    assert renderer.prompt(own)[-1:] == renderer.prompt(CHAT[:1])[-1:]


def test_all_templates_of_a_tokenizer_are_looked_through():
    tokenizer = byte_tokenizer(CHATML.replace("[GEN]", "").replace("[END]", ""))
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens[3:], "<call>"]})
    chat, own = [{"role": "user", "content": "What is <call>?"}, CHAT[1]], tokenizer.chat_template
    ChatRenderer(tokenizer).check_texts(chat)
    tokenizer.chat_template = {"tool_use": "<call>" + own, "default": own}
    with pytest.raises(ControlTokenError, match="'<call>' in user turn 1"):
        ChatRenderer(tokenizer).check_texts(chat)
    assert chat_template_hash(tokenizer) == hashlib.sha256(f"{own}\n<call>{own}".encode()).hexdigest()[:16]
    tokenizer.chat_template = {"default": own}
    assert chat_template_hash(tokenizer) == hashlib.sha256(own.encode()).hexdigest()[:16]


def test_calls_that_no_end_token_follows_are_refused_or_trained_on():
    form = READS.replace("{{ m.tool_calls | tojson }}{% endif %}", "{{ m.tool_calls | tojson + '<|call|>' }}{% else %}")
    form = form.replace("{{ '<|im_end|>\n' }}{% endfor %}", "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}")
    tokenizer = byte_tokenizer(form)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens[3:], "<|call|>"]})
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}, ANSWER]
    with pytest.raises(ConversationError, match=r"assistant turn 1 has none: .*name that token as eos_token_id"):
        ChatRenderer(tokenizer).conversation(chat)
    ids, mask = ChatRenderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|call|>")]).conversation(chat)
    assert trained_runs(tokenizer, ids, mask) == [json.dumps([CALL]) + "<|call|>", "Salut<|im_end|>"]
    unmarked = [USER, chat[1] | {"trained": False}, *chat[2:]]
    assert trained_runs(tokenizer, *ChatRenderer(tokenizer).conversation(unmarked)) == ["Salut<|im_end|>"]


NEEDS_RULES = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize("opening", ["", NEEDS_RULES])
@pytest.mark.parametrize("form", ["{{ ': ' + ARGUMENTS }}", ": {{ ARGUMENTS }}", "{{ ': ' ~ (ARGUMENTS | string) }}"])
def test_arguments_are_texts_for_a_template_that_writes_them_as_they_are(form, opening):
    """As transformers renders OpenAI's calls, whose arguments are JSON texts; a file may have them as objects too."""
    text = '{"city": "Köln", "ok": true, "at": null}'
    for named, called in (("m.tool_calls[0].function", "function"), ("m.tool_calls[0]", None)):
        written = f"{{{{ {named}.name }}}}" + form.replace("ARGUMENTS", f"{named}.arguments")
        tokenizer = byte_tokenizer(opening + READS.replace("{{ m.tool_calls | tojson }}", written))
        for arguments in (text, json.loads(text)):
            inner = {"name": "find", "arguments": arguments}
            turn, unknown = message_of(ANSWER | {"tool_calls": [{called: inner} if called else inner]})
            ids, mask = ChatRenderer(tokenizer).conversation([*SYSTEM, USER, turn])
            assert not unknown and "find: " + text in trained_runs(tokenizer, ids, mask)[0]


@pytest.mark.parametrize("form", ["{{ ARGUMENTS | tojson }}", "{% for key in ARGUMENTS %}{{ key }}={% endfor %}"])
def test_arguments_are_objects_for_other_templates(form):
    calls = "{% set call = m.tool_calls[0].function %}{{ call.name }}" + form.replace("ARGUMENTS", "call.arguments")
    tokenizer = byte_tokenizer(READS.replace("{{ m.tool_calls | tojson }}", calls))
    turn = ANSWER | {"tool_calls": [{"function": {"name": "find", "arguments": '{"a": 1}'}}]}
    text = tokenizer.decode(render_conversation(tokenizer, [USER, message_of(turn)[0]])[0])
    assert ('find{"a": 1}' if "tojson" in form else "finda=") in text


def test_the_template_of_a_conversation_decides_how_its_calls_are_written():
    """One of its own for conversations with tools (tool_use) may write arguments otherwise than the default one."""
    written = "{{ m.tool_calls[0].function.name }}: {{ m.tool_calls[0].function.arguments }}"
    tokenizer = byte_tokenizer(READS)
    tokenizer.chat_template = {"default": READS, "tool_use": READS.replace("{{ m.tool_calls | tojson }}", written)}
    turn = ANSWER | {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": True}}}]}
    for extra, told in (({"tools": TOOLS}, 'add: {"a": true}'), ({}, '"arguments": {"a": true}')):
        assert told in tokenizer.decode(ChatRenderer(tokenizer).conversation([USER, turn], extra)[0])
