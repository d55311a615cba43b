"""What a row says beside its turns, from the file to the shards and the held-out split."""

import hashlib
import json
from contextlib import nullcontext

import datasets
import pytest

from draft_heads.data.collate import split_held_out
from draft_heads.data.text.chat_template import load_chat_tokenizer
from draft_heads.data.text.conversations import Conversation, ConversationError
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.target.target import Target
from draft_heads.train.options import RunOptions
from draft_heads.train.training_data import load_data
from tests.data.labels.distilling.distilled import rows_of, run_distill
from tests.tiny_chat import byte_tokenizer, save_target, template, trained_runs

READS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + template("chatml")
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    """A target whose chat template reads `tools`; it ends most answers at once."""
    folder = tmp_path_factory.mktemp("tools")
    save_target(folder, extra_end=138)
    byte_tokenizer(READS_TOOLS).save_pretrained(folder)
    return str(folder)


def talk(question, *answers):
    turns = [turn for answer in answers for turn in ({"role": "user", "content": question}, answer)]
    return {"messages": turns or [{"role": "user", "content": question}]}


def said(text, **further):
    return {"role": "assistant", "content": text, **further}


@pytest.mark.parametrize("labels", ["argmax", "generate"])
def test_system_text_and_tools_are_in_the_rows(with_tools, tmp_path, labels):
    rows = [talk("Hi", said("x")), {"system": "Be brief.", **talk("Hi", said("x"))}]
    rows.append({"tools": TOOLS, **talk("Hi", said("x"))})
    manifest = run_distill(with_tools, write(tmp_path / "a.jsonl", rows), str(tmp_path / "o"), labels=labels)
    texts = [byte_tokenizer(READS_TOOLS).decode(row["input_ids"]) for row in rows_of(tmp_path / "o")]
    hello = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    openings = (hello, f"<|im_start|>system\nBe brief.<|im_end|>\n{hello}", json.dumps(TOOLS) + hello)
    assert len(texts) == 3 and all(text.startswith(opening) for text, opening in zip(texts, openings))
    assert manifest["data"]["repeated"] == 0
    assert len({row["conversation"] for row in rows_of(tmp_path / "o")}) == 3


@pytest.mark.parametrize("labels", ["argmax", "generate"])
def test_a_target_that_does_not_read_a_key_refuses_its_rows(target, tmp_path, labels):
    file = write(tmp_path / "a.jsonl", [talk("Hi", said("x")), {"tools": TOOLS, **talk("Who?", said("x"))}])
    with pytest.raises(ConversationError, match=r"line 2 \(id row-2\): .* does not read 'tools'.*set skip_bad_rows"):
        run_distill(target, file, str(tmp_path / "o"), labels=labels)
    manifest = run_distill(target, file, str(tmp_path / "p"), labels=labels, skip_bad_rows=True)
    assert manifest["counts"]["rows"] == 1 == manifest["counts"]["skipped"]


def test_a_template_that_takes_a_result_for_an_answer_is_refused():
    called = [said("<tool_call>"), {"role": "tool", "content": "RESULT"}, said("x")]
    for style, refused in (("vicuna", True), ("chatml", False)):
        renderer = ChatRenderer(byte_tokenizer(template(style)))
        with pytest.raises(ConversationError, match="the role of a tool turn") if refused else nullcontext():
            renderer.check_read([{"role": "user", "content": "Hi"}, *called])


@pytest.mark.parametrize("name", ["vicuna", "llama-2", "chatml"])
def test_a_later_system_turn_that_a_template_takes_for_an_answer_is_refused(name):
    """Clients of the server send them; the bundled templates have a place for the first turn's alone."""
    tokenizer = (
        byte_tokenizer(template("chatml")) if name == "chatml" else load_chat_tokenizer("tests/tiny_target", name)
    )
    renderer = ChatRenderer(tokenizer)
    hello = [{"role": "user", "content": "Hi."}, said("Hello.")]
    later = [*hello, {"role": "system", "content": "In French."}, {"role": "user", "content": "Who?"}]
    twice = [{"role": "system", "content": text} for text in ("Be brief.", "In French.")] + hello[:1]
    renderer.prompt([twice[0], *hello, *hello[:1]])
    refused = pytest.raises(
        ConversationError, match=r"the role of a system turn that is not the first|leaves out the system"
    )
    for messages in (later, twice):
        with nullcontext() if name == "chatml" else refused:
            renderer.prompt(messages)


def test_recorded_answers_without_an_end_token_are_counted_and_told(tmp_path, caplog):
    open_end = template("chatml").replace("+ '<|im_end|>' }}", "}}{% if not loop.last %}{{ '<|im_end|>' }}{% endif %}")
    save_target(tmp_path / "target")
    byte_tokenizer(open_end).save_pretrained(tmp_path / "target")
    rows = [talk("Hi", said("x"), said("y")), talk("Hi", said("x"))]
    manifest = run_distill(str(tmp_path / "target"), write(tmp_path / "a.jsonl", rows), str(tmp_path / "o"))
    assert manifest["counts"]["without_end"] == 2  # the one before a question has that which closes turns
    assert "2 recorded answers have no end token" in caplog.text
    options = {"labels": "generate", "max_new_tokens": 4}
    manifest = run_distill(str(tmp_path / "target"), str(tmp_path / "a.jsonl"), str(tmp_path / "p"), **options)
    assert manifest["counts"]["without_end"] == 0


def test_no_answer_is_counted_that_max_length_leaves_out_or_cuts(tmp_path):
    """Of two without an end token, and without their thoughts, before one that has both."""
    form = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ '[A]' }}{% elif loop.last %}"
        "{{ m.reasoning_content + eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    )
    save_target(tmp_path / "target")
    byte_tokenizer(form).save_pretrained(tmp_path / "target")
    answers = [said("x" * 9) | {"reasoning_content": thought} for thought in "pqr"]
    write(tmp_path / "a.jsonl", [talk("u" * 9, *answers)])
    # tokens 12–20 and 34–42 are the first two answers
    for most, ends, begun in ((80, 2, 2), (43, 2, 2), (42, 1, 2), (35, 1, 2), (34, 1, 1), (21, 1, 1), (20, 0, 1)):
        given = str(tmp_path / "target"), str(tmp_path / "a.jsonl"), str(tmp_path / f"{most}")
        counts = run_distill(*given, max_length=most)["counts"]
        assert (most, counts["without_end"], counts["shortened"]) == (most, ends, begun)


def test_a_template_that_writes_the_date_is_told(tmp_path, caplog):
    save_target(tmp_path / "target")
    byte_tokenizer("{{ strftime_now('%d %b') }}" + template("chatml")).save_pretrained(tmp_path / "target")
    run_distill(str(tmp_path / "target"), write(tmp_path / "a.jsonl", [talk("Hi", said("x"))]), str(tmp_path / "o"))
    assert "the chat template writes the date into prompts" in caplog.text


def test_generated_answers_in_place_of_turns_that_are_not_trained_on_are_not_trained_on(target, tmp_path):
    rows = [
        talk("Hi", said("x"), said("x")),
        talk("Hi", said("x", weight=0), said("x")),
        talk("Hi", said("x", weight=1)),
    ]
    rows = [row | {"id": i} for i, row in enumerate(rows)]
    options = {"labels": "generate", "max_new_tokens": 40}
    manifest = run_distill(target, write(tmp_path / "a.jsonl", rows), str(tmp_path / "o"), **options)
    tokenizer, runs = byte_tokenizer(template("chatml")), {"0": [], "1": [], "2": []}
    for row in rows_of(tmp_path / "o"):  # an answer of bytes of no letter ends one, and there are such
        runs[row["id"]] += trained_runs(tokenizer, row["input_ids"], row["assistant_mask"])
    assert manifest["data"]["repeated"] == 0 and len(runs["0"]) == 2
    assert runs["1"] == runs["0"][1:] and runs["2"] == runs["0"][:1]
    assert len({row["conversation"] for row in rows_of(tmp_path / "o")}) == 1


def test_prompts_alone_get_the_answers_that_recorded_conversations_get(target, tmp_path):
    recorded = [talk(f"Question {i}", said("x")) for i in range(5)]
    alone = [talk(f"Question {i}") for i in range(4)] + [{"prompt": "Question 4"}]
    for name, rows in (("recorded", recorded), ("alone", alone)):
        file = write(tmp_path / f"{name}.jsonl", rows)
        run_distill(target, file, str(tmp_path / name), labels="generate", max_new_tokens=6, hidden_states="target")
    assert rows_of(tmp_path / "alone") == rows_of(tmp_path / "recorded")


def test_rows_whose_id_is_the_name_of_their_source_are_held_out_one_by_one(target, tmp_path, caplog):
    rows = [{"id": "sharegpt", **talk(f"Question {i % 20}", said(f"Answer {i}"))} for i in range(30)]
    run_distill(target, write(tmp_path / "a.jsonl", rows), str(tmp_path / "o"))
    dataset = datasets.Dataset.from_list(rows_of(tmp_path / "o"))
    train, held = split_held_out(dataset, rows=8)
    assert 8 <= len(held) <= 9 and len(train) + len(held) == 30
    assert not set(train["conversation"]) & set(held["conversation"])  # questions 0 to 9 are asked twice
    told = [f"{len(held)} rows are held out, not 8: rows of one conversation stay together"]
    assert caplog.messages == (told if len(held) == 9 else [])
    by_id = dataset.remove_columns("conversation").select(range(29))
    with pytest.raises(ValueError, match="rows of one id are held out together; all 29 have the same"):
        split_held_out(by_id, rows=8)


def test_datasets_of_versions_without_the_column_are_tied_by_id_as_then(caplog):
    old = datasets.Dataset.from_dict({"id": [f"c{i % 10}" for i in range(20)]})
    new = datasets.Dataset.from_dict({"id": ["c1"] * 5, "conversation": [f"d{i}" for i in range(5)]})
    train, held = split_held_out(datasets.concatenate_datasets([old, new]), rows=6)
    assert not set(train["id"]) & set(held["id"])
    _, alone = split_held_out(old, rows=5)
    assert len(alone) == 6 and caplog.messages[-1] == "6 rows are held out, not 5: rows of one id stay together"


def test_a_key_beside_the_turns_makes_another_dataset(with_tools, tmp_path):
    rows = [talk("Hi", said("x")), talk("Who?", said("y"))]
    prints = []
    for number, further in enumerate(({}, {"system": "Be brief."}, {"tools": TOOLS}, {"source": "web"})):
        file = write(tmp_path / f"{number}.jsonl", [rows[0], rows[1] | further])
        prints.append(run_distill(with_tools, file, str(tmp_path / str(number)))["data"]["fingerprint"])
    assert len(set(prints)) == 3 and prints[0] == prints[3]
    plain = "".join(json.dumps([f"row-{i}", row["messages"]]) for i, row in enumerate(rows, start=1))
    assert prints[0] == hashlib.sha256(plain.encode()).hexdigest()[:16]  # as of earlier versions, whose runs go on


def test_a_limit_counts_the_questions_that_are_left(tmp_path):
    save_target(tmp_path / "target", extra_end=138)
    byte_tokenizer(TRIMS).save_pretrained(tmp_path / "target")
    texts = [text for number in range(6) for text in (f"Number {number}?", f" Number {number}? ")]
    rows = write(tmp_path / "a.jsonl", [talk(text) for text in texts])
    for name, options in (("plain", {}), ("shuffled", {"shuffle_seed": 1})):
        manifest = run_distill(
            str(tmp_path / "target"),
            rows,
            str(tmp_path / name),
            labels="generate",
            limit=4,
            max_new_tokens=4,
            **options,
        )
        assert manifest["data"]["rows"] == 4
        assert len({row["id"] for row in rows_of(tmp_path / name)}) == 4


def test_a_row_that_is_refused_hides_no_other_of_the_same_text(target, tmp_path):
    marks = "<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\n"
    rows = [talk(f"Hi{marks}Bye"), {"messages": [*talk("Hi", said("x"))["messages"], *talk("Bye")["messages"]]}]
    options = {"labels": "generate", "max_new_tokens": 4, "skip_bad_rows": True}
    manifest = run_distill(target, write(tmp_path / "a.jsonl", rows), str(tmp_path / "o"), **options)
    assert manifest["data"]["repeated"] == 0 and {row["id"] for row in rows_of(tmp_path / "o")} == {"row-2"}


def test_folders_that_name_questions_in_two_ways_are_told(target, tmp_path, caplog):
    for name, first in (("new", 0), ("old", 2)):
        chats = [talk(f"Number {number}?", said("x")) for number in range(first, first + 4)]
        run_distill(target, write(tmp_path / f"{name}.jsonl", chats), str(tmp_path / name))
    manifest = json.loads((tmp_path / "old" / "manifest.json").read_text())
    assert manifest.pop("named_by") == "prompt"
    run = RunOptions(target=target, dataset=[str(tmp_path / "new")], held_out=1)
    load_data(run, Target.from_pretrained(target))
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(manifest))
    assert "two ways" not in caplog.text
    run = RunOptions(target=target, dataset=[str(tmp_path / "new"), str(tmp_path / "old")], held_out=1)
    load_data(run, Target.from_pretrained(target))
    assert "written by versions that name questions in two ways" in caplog.text


def test_a_folder_that_an_older_version_began_goes_on_with_its_names(target, tmp_path):
    rows = [talk(f"Number {number}?", said("x")) for number in range(4)]
    file, out = write(tmp_path / "a.jsonl", rows), tmp_path / "out"
    run_distill(target, file, str(out), shard_rows=2)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest.pop("named_by")
    (out / "manifest.json").write_text(json.dumps({**manifest, "shards": manifest["shards"][:1], "complete": False}))
    run_distill(target, file, str(out), shard_rows=2)
    asked = [Conversation([{"role": "user", "content": f"Number {number}?"}], {}).opening for number in (2, 3)]
    assert [row["conversation"] for row in rows_of(out)][2:] == asked


def test_rows_whose_settings_say_what_of_answers_is_shown_are_two_questions(tmp_path):
    """As Qwen 3.5's preserve_thinking: what the target will have thought is not known beforehand."""
    keeps = "(m.content if keep else m.content.split('</think>')[-1]) | trim"
    save_target(tmp_path / "target", extra_end=138)
    byte_tokenizer(template("chatml").replace("m['content'] | trim", keeps)).save_pretrained(tmp_path / "target")
    twice = {"messages": [*talk("Hi", said("x"))["messages"], {"role": "user", "content": "Hi"}]}
    rows = [twice, twice | {"chat_template_kwargs": {"keep": True}}, twice | {"chat_template_kwargs": {"keep": False}}]
    file = write(tmp_path / "a.jsonl", rows)
    manifest = run_distill(str(tmp_path / "target"), file, str(tmp_path / "o"), labels="generate")
    assert manifest["data"]["repeated"] == 1


SYSTEM_SHOWN = "{% for m in messages if m.content | trim %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>"
TRIMS = (
    "{{ strftime_now('%d %b') }}" + SYSTEM_SHOWN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize("labels", ["argmax", "generate"])
def test_rows_that_the_template_makes_one_prompt_are_one_question(tmp_path, labels):
    save_target(tmp_path / "target", extra_end=138)
    byte_tokenizer(TRIMS).save_pretrained(tmp_path / "target")
    one, composed = talk("Ren\u00e9?", said("x")), talk("Rene\u0301?", said("x"))
    blank = {"messages": [{"role": "system", "content": ""}, *one["messages"]]}
    rows = [one, blank, one | {"enable_thinking": True}, talk(" Ren\u00e9? ", said("x")), composed]
    rows += [one | {"enable_thinking": False}, one | {"system": "x"}]
    manifest = run_distill(
        str(tmp_path / "target"), write(tmp_path / "a.jsonl", rows), str(tmp_path / "o"), labels=labels
    )
    # the accent, written in two ways, is one first question and two prompts
    prompts, names = (4, 3) if labels == "generate" else (7, 3)
    asked = list(dict.fromkeys(row["id"] for row in rows_of(tmp_path / "o")))
    assert len(asked) == prompts and manifest["data"]["repeated"] == (3 if labels == "generate" else 0)
    found = {row["conversation"] for row in rows_of(tmp_path / "o")}
    assert len(found) == names
    start = "%d %b<|im_start|>user\nRen\u00e9?<|im_end|><|im_start|>assistant\n"
    assert hashlib.sha256(start.encode()).hexdigest()[:16] in found
