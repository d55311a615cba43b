"""The trained tokens of templates of the forms that models ship, none of which marks them with `{% generation %}`."""

import datasets
import pytest

from draft_heads.data.labels.answers import Answer
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.distiller import Distiller
from draft_heads.data.text.end_tokens import end_token_ids
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from draft_heads.data.text.token_spans import PLAIN, answer_tokens
from draft_heads.inference.target.target import Target
from tests.tiny_chat import byte_tokenizer, random_llama, render_conversation, render_prompt, trained_runs

FIRST = "{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}{% set turns = messages[1:] %}"
FIRST += "{% else %}{% set rules = '' %}{% set turns = messages %}{% endif %}"
ALTERNATE = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns alternate') }}{% endif %}"
LLAMA_3 = (
    "{{ bos_token }}"
    + FIRST
    + "{{ '<|header|>system<|/header|>\n\nToday: 1 May\n' + rules + '<|eot|>' }}{% for m in turns %}"
    "{{ '<|header|>' + m.role + '<|/header|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}" + FIRST + "{% for m in turns %}" + ALTERNATE + "{{ '<turn>' + ('model' if m.role == 'assistant' "
    "else m.role) + '\n' + (rules + '\n\n' if rules and loop.first else '') + m.content | trim + '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
MISTRAL = (  # the system text moves to the last user turn
    "{{ bos_token }}" + FIRST + "{% set last = turns | selectattr('role', 'equalto', 'user') | list | length %}"
    "{% set ns = namespace(asked=0) %}{% for m in turns %}{% if m.role == 'user' %}{% set ns.asked = ns.asked + 1 %}"
    "{{ '[INST]' + (rules + '\n\n' if rules and ns.asked == last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GRANITE = (
    FIRST + "{{ '<|role|>system<|/role|>' + (rules or 'Today is 1 May.') + eos_token + '\n' }}{% for m in turns %}"
    "{{ '<|role|>' + m.role + '<|/role|>' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|role|>assistant<|/role|>' }}{% endif %}"
)
CHANNELS = (  # gpt-oss: an analysis before the answer, which later prompts leave out; the last answer ends otherwise
    "{{ '<|start|>system<|message|>Today: 1 May<|end|>' }}" + FIRST + "{% if rules %}"
    "{{ '<|start|>developer<|message|>' + rules + '<|end|>' }}{% endif %}{% for m in turns %}"
    "{% if m.role == 'assistant' %}{% if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}"
    "{% endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
THOUGHTS = (  # Qwen3: thoughts are dropped from all answers but one behind the last question
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set text = m.content %}"
    "{% if m.role == 'assistant' %}{% set thought = '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{ text + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
ROLES += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
FORMS = {
    "llama-3": (LLAMA_3, "<|header|> <|/header|> <|eot|>", ("<|eot|>", "<|eot|>")),
    "gemma": (GEMMA, "<turn> </turn>", ("</turn>", "</turn>")),
    "mistral": (MISTRAL, "[INST] [/INST]", ("</s>", "</s>")),
    "phi": (PHI, "<|system|> <|user|> <|assistant|> <|end|>", ("<|end|>", "<|end|>")),
    "granite": (GRANITE, "<|role|> <|/role|>", ("</s>", "</s>")),
    "channels": (CHANNELS, "<|start|> <|message|> <|channel|> <|end|> <|return|>", ("<|end|>", "<|return|>")),
    "thoughts": (THOUGHTS, "", ("<|im_end|>", "<|im_end|>")),
    "roles alone": (ROLES, "<|system|> <|user|> <|assistant|>", ("", "")),  # GLM: the next role ends a turn
}
SYSTEM = [{"role": "system", "content": "Be kind."}]
CHAT = [
    {"role": "user", "content": "Hello there. 1 2"},
    {"role": "assistant", "content": "I am fine, thank you."},
    {"role": "user", "content": "Once more?"},
    {"role": "assistant", "content": "12\n\n  34 é😀"},
]
THOUGHTFUL = [{**m, "content": f"<think>\nWell.\n</think>\n\n{m['content']}"} if m in CHAT[1::2] else m for m in CHAT]


def tokenizer_of(form):
    chat_template, special, _ = FORMS[form]
    tokenizer = byte_tokenizer(chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens[3:], *special.split()]})
    return tokenizer


@pytest.mark.parametrize("system", [[], SYSTEM], ids=["no system turn", "system turn"])
@pytest.mark.parametrize("form", FORMS)
def test_the_trained_tokens_are_the_answers_with_their_end_and_nothing_else(form, system):
    tokenizer, ends = tokenizer_of(form), FORMS[form][2]
    ids, mask = render_conversation(tokenizer, system + CHAT)
    expected = [CHAT[1]["content"] + ends[0], CHAT[3]["content"] + ends[1]]
    assert [run.lstrip(" ") for run in trained_runs(tokenizer, ids, mask)] == expected
    assert not ends[1] or tokenizer.convert_tokens_to_ids(ends[1]) in end_token_ids(tokenizer)
    assert system == [] or "Be kind." in tokenizer.decode(ids)


def test_thoughts_are_trained_where_the_template_leaves_them():
    tokenizer = tokenizer_of("thoughts")
    ids, mask = render_conversation(tokenizer, THOUGHTFUL)
    assert trained_runs(tokenizer, ids, mask) == [
        "I am fine, thank you.<|im_end|>",
        "<think>\nWell.\n</think>\n\n12\n\n  34 é😀<|im_end|>",
    ]


def test_an_answer_whose_thought_is_dropped_is_refused_and_an_earlier_one_is_counted(caplog):
    dropping = (  # as DeepSeek-R1's, whose prompts begin the thought
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] }}"
        "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
    )
    tokenizer = byte_tokenizer(dropping)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    renderer, thought = ChatRenderer(tokenizer), "<think>\nHm, 2 + 2.\n</think>\n\n"
    for answer in (thought + "Four.", thought):
        with pytest.raises(ConversationError, match=r"at least 21 characters of assistant turn 1, .*labels generate"):
            renderer.conversation([CHAT[0], {"role": "assistant", "content": answer}])
    chat = [CHAT[0], {"role": "assistant", "content": thought + "Four."}, *CHAT[2:]]
    for _ in range(2):
        ids, mask = renderer.conversation(chat)
    assert trained_runs(tokenizer, ids, mask) == ["\n\nFour.</s>", CHAT[3]["content"] + "</s>"]
    assert renderer.shortened(chat) == [1] and not renderer.shortened([*chat[:1], {**chat[1], "trained": False}])
    assert sum("prompts end with" in line for line in caplog.messages) == 1
    keys = [CHAT[0], {**CHAT[1], "reasoning_content": "Hm."}, *CHAT[2:]]
    assert [renderer.shortened(some) for some in (CHAT, keys)] == [[], [1]]


@pytest.mark.parametrize(
    ("form", "chat", "told"),
    [
        ("gemma", CHAT[1:], "turns alternate"),
        ("channels", [CHAT[0], {**CHAT[1], "content": "<|channel|>"}], "channels in"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_words(form, chat, told):
    with pytest.raises(ConversationError, match=f"refuses the conversation .*{told}"):
        render_conversation(tokenizer_of(form), chat)


@pytest.mark.parametrize("form", FORMS)
def test_templates_that_may_leave_out_thoughts_are_known(form):
    assert ChatRenderer(tokenizer_of(form)).probe.may_rewrite == (form in ("channels", "thoughts"))


def generated_rows(form, answers, chat=CHAT):
    """The rows of one conversation with these answers as the target's own, and their renderer."""
    tokenizer = tokenizer_of(form)
    model = random_llama(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(FORMS[form][2][1] or "<|user|>")
    target = Target(model, tokenizer)
    said = iter(tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers)
    answerer = lambda prompts, limits: enumerate(Answer(next(said), "end") for _ in prompts)  # noqa: E731
    distiller = Distiller(target, DistillOptions(labels="generate"), answerer)
    recorded = [{"id": "a", "place": "row 1", "messages": [*SYSTEM, *chat]}]
    return list(distiller.rows(datasets.Dataset.from_list(recorded))), tokenizer


@pytest.mark.parametrize("form", ["llama-3", "gemma", "phi", "granite"])
def test_generated_answers_stay_in_one_row(form):
    end = FORMS[form][2][1]
    (row,), tokenizer = generated_rows(form, [f"One.{end}", f"Two.{end}"])
    assert trained_runs(tokenizer, row.ids, row.mask) == [f"One.{end}", f"Two.{end}"]
    own = [*SYSTEM, CHAT[0], {"role": "assistant", "content": "One."}, CHAT[2]]
    assert row.ids[: len(row.ids) - row.mask[::-1].index(False)] == render_prompt(tokenizer, own)


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        ("thoughts", ["<think>\nWell.\n</think>\n\nOne.<|im_end|>", "<think>\n</think>\n\nTwo.<|im_end|>"]),
        (
            "channels",
            [
                "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>One.<|return|>",
                "<|channel|>final<|message|>Two.<|return|>",
            ],
        ),
        ("mistral", [" One.</s>", " Two.</s>"]),
    ],
)
def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each_prompt(form, answers):
    rows, tokenizer = generated_rows(form, answers)
    prompts = [row.ids[: row.mask.index(True)] for row in rows]
    own = [*SYSTEM, CHAT[0], {"role": "assistant", "content": "One."}, CHAT[2]]
    assert prompts == [render_prompt(tokenizer, own[:2]), render_prompt(tokenizer, own)]
    assert [trained_runs(tokenizer, row.ids, row.mask) for row in rows] == [[answer] for answer in answers]
    assert {(row.number, row.id) for row in rows} == {(0, "a")}


def test_a_last_answer_that_is_not_trained_on_leaves_the_row_before_it_alone():
    chat = [{**message, "trained": number != 3} for number, message in enumerate(CHAT[:4])]
    answers = ["<think>\n</think>\n\nOne.<|im_end|>", "<think>\n</think>\n\nTwo.<|im_end|>"]
    (row,), tokenizer = generated_rows("thoughts", answers, chat)
    assert row.skipped is None and trained_runs(tokenizer, row.ids, row.mask) == answers[:1]


def test_a_token_that_ends_an_answer_and_begins_the_next_turn_is_there_once():
    (row,), tokenizer = generated_rows("roles alone", ["One.<|user|>", "Two.<|user|>"])
    assert tokenizer.decode(row.ids).count("<|user|>") == 3
    assert trained_runs(tokenizer, row.ids, row.mask) == ["One.<|user|>", "Two.<|user|>"]


def test_what_an_answer_in_channels_says_is_its_last_channel():
    tokenizer = tokenizer_of("channels")
    answer = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>One.<|return|>"
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert ChatRenderer(tokenizer).answer_text(ids, ids[-1:]) == ("One.", False)
    assert answer_tokens([5, 6], [], PLAIN) == [5, 6] and answer_tokens([], [], PLAIN) == []
