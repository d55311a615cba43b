"""Rows: one conversation reads the same in every form of a file, and counts add up with the file and the shards."""

import json
import tempfile
from collections import Counter
from functools import cache
from operator import attrgetter
from pathlib import Path

import datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_heads.data.text.conversations import conversation_of, read_conversations
from tests.data.labels.distilling.distilled import rows_of, run_distill
from tests.tiny_chat import save_target

TEXTS = st.text("ab c\n", min_size=1, max_size=8).filter(str.strip)
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ARGUMENTS = st.sampled_from([{}, {}, {"tools": TOOLS}, {"enable_thinking": False}, {"documents": [{"text": "d"}]}])
METADATA = st.dictionaries(st.sampled_from(["title", "model", "lang", "score", "views"]), TEXTS, max_size=2)


@st.composite
def conversations(draw, further=True):
    """(messages, the template's further arguments) as they shall be read."""
    rules = draw(st.none() | TEXTS)
    messages = [] if rules is None else [{"role": "system", "content": rules}]
    pairs = draw(st.integers(1, 3))
    for pair in range(pairs):
        messages.append({"role": "user", "content": draw(TEXTS)})
        answer = {"role": "assistant", "content": draw(TEXTS)}
        if further and draw(st.booleans()):
            answer["reasoning_content"] = draw(TEXTS)
        if further and pair + 1 < pairs and draw(st.booleans()):
            answer["trained"] = False
        messages.append(answer)
    return messages, draw(ARGUMENTS) if further else {}


def written(draw, conversation):
    """A row of the conversation, in a form that is drawn."""
    messages, extra = conversation
    beside = messages[0]["role"] == "system" and draw(st.booleans())
    row = dict(draw(METADATA))
    if beside:
        row[draw(st.sampled_from(["system", "system_prompt"]))] = messages[0]["content"]
    sharegpt = draw(st.booleans())
    turns = []
    for message in messages[beside:]:
        rest = {key: value for key, value in message.items() if key not in ("role", "content", "trained")}
        content = message["content"]
        if draw(st.booleans()):
            cut = draw(st.integers(0, len(content)))
            content = [{"type": "text", "text": part} for part in (content[:cut], content[cut:])]
        if sharegpt:
            turn = {"from": SHAREGPT[message["role"]], "value": content, **rest}
        else:
            turn = {"role": message["role"], "content": content, **rest}
        if "trained" in message:
            turn |= draw(st.sampled_from([{"weight": 0}, {"train": False}]))
        elif message["role"] == "assistant":
            turn |= draw(st.sampled_from([{}, {"weight": 1}, {"train": True}, {"weight": None}]))
        turns.append(dict(draw(st.permutations(list(turn.items())))))
    row["conversations" if sharegpt else "messages"] = turns
    for name, value in extra.items():
        plain = not isinstance(value, list)
        row |= draw(st.sampled_from([{name: value}, {"chat_template_kwargs": {name: value}}]))
        if not plain and name in row and draw(st.booleans()):
            row[name] = json.dumps(value)
    return dict(draw(st.permutations(list(row.items()))))


def read(source, **options):
    loaded = read_conversations(str(source), **options)
    return [tuple(conversation_of(row)) for row in loaded.dataset], loaded


@given(st.data(), st.lists(conversations(), min_size=1, max_size=4))
def test_a_conversation_reads_the_same_in_every_form(data, expected):
    rows = [written(data.draw, conversation) for conversation in expected]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        found, loaded = read(file)
        assert found == expected and not loaded.bad_rows
        loaded.dataset.save_to_disk(Path(folder) / "stored")
        assert read(Path(folder) / "stored")[0] == expected


@given(st.data(), st.lists(conversations(further=False), min_size=1, max_size=4))
def test_arrow_fills_what_a_row_lacks_and_nothing_changes(data, expected):
    rows = [written(data.draw, conversation) for conversation in expected]
    for row in rows:  # Arrow needs one type for a column
        for turn in row.get("messages", row.get("conversations")):
            key = "content" if "content" in turn else "value"
            turn[key] = turn[key] if isinstance(turn[key], str) else "".join(part["text"] for part in turn[key])
            turn.pop("weight", None)
    columns = {key: [row.get(key) for row in rows] for key in {key for row in rows for key in row}}
    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset.from_dict(columns).save_to_disk(folder)
        assert read(folder)[0] == expected


def spoiled(draw, row):
    """A row with one fault that is drawn, or without."""
    name = draw(st.sampled_from(["", "", "unknown", "lost", "role", "empty", "early", "twice", "json"]))
    turns = row["messages"]
    if name == "unknown":
        row["persona"] = "p"
    elif name == "lost":
        row["context"] = "In 1789"
    elif name == "role":
        turns[draw(st.integers(0, len(turns) - 1))]["role"] = "critic"
    elif name == "empty":
        turns[-1]["content"] = " "
    elif name == "early":
        turns.insert(0, {"role": "assistant", "content": "a"})
    elif name == "twice":
        turns.append({"role": "assistant", "content": "a"})
    return "{" if name == "json" else json.dumps(row)


def spoiled_file(data, folder, expected):
    lines = [spoiled(data.draw, {"messages": [dict(turn) for turn in messages]}) for messages, _ in expected]
    file = Path(folder) / "rows.jsonl"
    file.write_text("\n".join([*lines, json.dumps({"messages": [{"role": "user", "content": "z"}, ANSWER]})]))
    return file, len(lines) + 1


ANSWER = {"role": "assistant", "content": "a"}


@given(st.data(), st.lists(conversations(further=False), min_size=1, max_size=6), st.booleans())
def test_kept_trimmed_dropped_and_repeated_rows_add_up_with_the_file(data, expected, generate):
    with tempfile.TemporaryDirectory() as folder:
        file, rows = spoiled_file(data, folder, expected)
        _, loaded = read(file, skip_bad_rows=True, asked=attrgetter("key") if generate else None)
    places = {
        outcome: {bad.place for bad in loaded.bad_rows if bad.outcome == outcome} for outcome in ("trimmed", "dropped")
    }
    kept = list(loaded.dataset["place"])
    assert len(kept) + len(places["dropped"]) + loaded.repeated == rows
    assert not places["dropped"] & ({*kept} | places["trimmed"])
    assert loaded.repeated or places["trimmed"] <= {*kept}
    turns = {row["place"]: len(row["messages"]) for row in loaded.dataset}
    assert all(bad.kept_turns == turns[bad.place] for bad in loaded.bad_rows if bad.place in turns)


@cache
def target():
    """A target that ends some answers."""
    return save_target(Path(tempfile.mkdtemp()), extra_end=138)


@settings(max_examples=max(8, settings.default.max_examples // 20))  # each labels rows
@given(st.data(), st.lists(conversations(further=False), min_size=1, max_size=6), st.booleans(), st.integers(24, 80))
def test_the_manifests_figures_are_those_of_the_shards(data, expected, generate, max_length):
    with tempfile.TemporaryDirectory() as folder:
        file, rows = spoiled_file(data, folder, expected)
        options = dict(labels="generate" if generate else "argmax", max_length=max_length, max_new_tokens=9)
        manifest = run_distill(target(), str(file), str(Path(folder) / "out"), skip_bad_rows=True, **options)
        found = rows_of(Path(folder) / "out")
    counts, shards = manifest["counts"], manifest["shards"]
    bad = {row["place"] for row in manifest["data"]["bad_rows"] if not row["kept_turns"]}
    assert manifest["data"]["rows"] + manifest["data"]["repeated"] + len(bad) == rows
    assert sum(shard["source_rows"] for shard in shards) == manifest["data"]["rows"]
    labelled = {row["id"] for row in found}  # of a conversation there may be several rows
    assert (
        sum(len(shard["skipped"]) for shard in shards) == counts["skipped"] == manifest["data"]["rows"] - len(labelled)
    )
    assert (counts["rows"], [shard["rows"] for shard in shards]) == (
        len(found),
        [shard["counts"]["rows"] for shard in shards],
    )
    assert counts["tokens"] == sum(len(row["input_ids"]) for row in found)
    trained = [
        (token, label)
        for row in found
        for token, label, mask in zip(row["input_ids"], row["greedy_ids"], row["assistant_mask"])
        if mask
    ]
    assert counts["trained_tokens"] == len(trained)
    agreeing = Counter(token == label for token, label in trained)[True]
    assert (counts["agreeing_tokens"], counts["agreement"]) == (agreeing, round(agreeing / len(trained), 6))
    assert counts["cut"] == sum(len(shard["cut"]) for shard in shards)
    assert all(len(row["input_ids"]) <= max_length and any(row["assistant_mask"]) for row in found)
