"""Datastores: the suffix array, the folder's round trip, and folders that cannot be used."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from draft_heads.data import datastore_build
from draft_heads.data.common.files import lock_folder
from draft_heads.data.datastore import ARRAYS, MANIFEST, Datastore
from draft_heads.data.datastore_build import build_datastore, suffix_array
from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.data.labels.shards import load_distilled
from draft_heads.data.text.chat_template import load_chat_tokenizer
from draft_heads.scripts import build_datastore as script
from draft_heads.scripts import distill as distill_script
from tests.tiny_chat import render_conversation

TINY = "tests/tiny_target"


@pytest.mark.parametrize("alphabet,depth", [(1, 8), (2, 4), (3, 16), (50, 2)])
def test_suffixes_are_in_order_up_to_the_depth(alphabet, depth):
    tokens = np.random.default_rng(depth).integers(0, alphabet, 300).astype(np.uint16)
    words = tokens.tolist()
    order = sorted(range(300), key=lambda place: words[place : place + depth])
    assert suffix_array(tokens, depth).tolist() == order


def test_the_worked_example_of_a_suffix_array():
    assert suffix_array(np.array([1, 2, 1, 2, 3])).tolist() == [0, 2, 1, 3, 4]
    with pytest.raises(ValueError, match="power of two; got 12"):
        suffix_array(np.array([1]), 12)


def rows(count):
    return [
        {
            "id": str(number),
            "conversations": [
                {"from": "human", "value": f"How many apples are {number} and {number}?"},
                {"from": "gpt", "value": f"{number} and {number} are {2 * number} apples."},
            ],
        }
        for number in range(count)
    ]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(rows(9)))
    return path


@pytest.fixture
def store(tmp_path, source):
    build_datastore(str(source), load_chat_tokenizer(TINY), tmp_path / "store")
    return tmp_path / "store"


def test_the_folder_holds_the_conversations_and_their_suffixes(store):
    opened, tokenizer = Datastore.open(store), load_chat_tokenizer(TINY)
    expected = []
    assert len(tokenizer) == 1 + max(tokenizer.get_vocab().values())
    for row in rows(9):
        human, gpt = (turn["value"] for turn in row["conversations"])
        messages = [{"role": "user", "content": human}, {"role": "assistant", "content": gpt}]
        expected += [*render_conversation(tokenizer, messages)[0], len(tokenizer)]
    assert opened.tokens.tolist() == expected
    assert opened.tokens.dtype == np.dtype("<u2") and not opened.tokens.flags.owndata
    assert opened.suffixes.tolist() == suffix_array(np.array(expected)).tolist()
    first = opened.tokens[opened.suffixes]
    assert [int(np.searchsorted(first, token)) for token in range(len(tokenizer) + 2)] == opened.starts.tolist()
    assert opened.manifest["tokenizer_hash"] == tokenizer_hash(tokenizer)
    assert (opened.manifest["conversations"], opened.manifest["dataset"]["name"]) == (9, "chats.json")


def test_of_a_distilled_folder_the_rows_are_taken_as_they_are(tmp_path, source, capsys):
    distilled = str(tmp_path / "distilled")
    distill = ["--target", TINY, "--dataset", str(source), "--output", distilled, "--labels", "generate"]
    assert distill_script.main([*distill, "--max_new_tokens", "12"]) == 0
    words = ["--dataset", distilled, "--tokenizer", TINY, "--output", str(tmp_path / "out")]
    assert script.main([*words, "--limit", "5"]) == 0
    opened, separator = Datastore.open(tmp_path / "out"), len(load_chat_tokenizer(TINY))
    answered = load_distilled(distilled).dataset["input_ids"][:5]
    assert opened.tokens.tolist() == [token for row in answered for token in (*row, separator)]
    assert (opened.manifest["conversations"], opened.manifest["dataset"]["name"]) == (5, "distilled")
    assert script.main([*words, "--overwrite", "--skip_bad_rows"]) == 2
    assert "holds distilled rows; leave them out" in capsys.readouterr().err
    assert script.main([*words, "--overwrite", "--chat_template", "vicuna"]) == 2
    assert "got vicuna with" in (told := capsys.readouterr().err) and "rendered already; leave it out" in told
    assert Datastore.open(tmp_path / "out").manifest == opened.manifest
    assert script.main([*words[:-1], f"{tmp_path}/out/../distilled"]) == 2
    assert "--output must be another folder than --dataset" in capsys.readouterr().err
    manifest, own = tmp_path / "distilled" / "manifest.json", opened.manifest["tokenizer_hash"]
    manifest.write_text(manifest.read_text().replace(own, "another"))
    assert script.main([*words, "--overwrite"]) == 2
    assert f"was distilled with another, got {own}; pass" in capsys.readouterr().err


def test_the_rows_of_a_distilled_conversation_count_once_and_stay_together(tmp_path, source, monkeypatch):
    distilled, tokenizer = str(tmp_path / "distilled"), load_chat_tokenizer(TINY)
    assert distill_script.main(["--target", TINY, "--dataset", str(source), "--output", distilled]) == 0
    whole = load_distilled(distilled)
    ids, asked = ["a", "b", "a", "c", "c"], ["x", "y", "x", "x", "y"]  # a's turns were rewritten, the c's are two
    rows = whole.dataset.select(range(5)).remove_columns(["id", "conversation"])
    rows = rows.add_column("id", ids).add_column("conversation", asked)
    monkeypatch.setattr(datastore_build, "load_distilled", lambda folder: replace(whole, dataset=rows))
    for limit, conversations, kept in ((1, 1, (0, 2)), (2, 2, (0, 1, 2)), (3, 3, (0, 1, 2, 3)), (None, 4, range(5))):
        found = build_datastore(distilled, tokenizer, tmp_path / f"out-{limit}", limit)
        assert found["conversations"] == conversations
        expected = [token for row in kept for token in (*rows[row]["input_ids"], len(tokenizer))]
        assert Datastore.open(tmp_path / f"out-{limit}").tokens.tolist() == expected


def test_of_rows_with_cached_states_a_limit_does_not_take_the_shortest(tmp_path, monkeypatch):
    """They are stored by length; which are taken depends on the conversations alone, not on the order of the rows."""
    distilled, tokenizer = str(tmp_path / "distilled"), load_chat_tokenizer(TINY)
    chats = rows(9)
    for number, row in enumerate(chats):
        row["conversations"][0]["value"] += " Why?" * (7 * number % 9)
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    words = ["--target", TINY, "--dataset", str(tmp_path / "chats.json"), "--output", distilled, "--hidden_states"]
    assert distill_script.main(words) == 0
    whole, taken = load_distilled(distilled), []
    lengths = [len(row["input_ids"]) for row in whole.dataset]
    assert lengths == sorted(lengths) and len(set(lengths)) > 4
    for number in range(2):
        ordered = whole.dataset.select(range(len(lengths))[:: 1 - 2 * number])
        monkeypatch.setattr(datastore_build, "load_distilled", lambda _, found=ordered: replace(whole, dataset=found))
        build_datastore(distilled, tokenizer, tmp_path / f"out-{number}", 4)
        tokens = Datastore.open(tmp_path / f"out-{number}").tokens.tolist()
        ends = [-1, *(place for place, token in enumerate(tokens) if token == len(tokenizer))]
        taken.append(sorted(last - first - 1 for first, last in pairwise(ends)))
    assert taken[0] == taken[1] != lengths[:4]


def test_two_builds_in_one_folder_are_refused(tmp_path, source):
    folder, tokenizer = tmp_path / "out", load_chat_tokenizer(TINY)
    with lock_folder(folder, "--output"), pytest.raises(ValueError, match="is being written by another run"):
        build_datastore(str(source), tokenizer, folder)
    build_datastore(str(source), tokenizer, folder, overwrite=False)
    with pytest.raises(ValueError, match=f"{folder} was finished by another run meanwhile"):
        build_datastore(str(source), tokenizer, folder, overwrite=False)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, *sorted(f"{name}.npy" for name in ARRAYS)]


def test_the_script_writes_a_folder_once(tmp_path, source, capsys):
    words = ["--dataset", str(source), "--tokenizer", TINY, "--output", str(tmp_path / "out"), "--limit", "4"]
    assert script.main(words) == 0
    assert "of 4 conversations" in capsys.readouterr().out
    assert Datastore.open(tmp_path / "out" / MANIFEST).manifest["conversations"] == 4
    assert script.main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert script.main([*words, "--overwrite"]) == 0


def test_a_datastore_that_is_made_again_leaves_the_arrays_of_its_readers(tmp_path, source):
    words = ["--dataset", str(source), "--tokenizer", TINY, "--output", str(tmp_path / "out")]
    assert script.main(words) == 0
    opened = Datastore.open(tmp_path / "out")
    before = [np.array(opened.tokens), np.array(opened.suffixes)]
    assert script.main([*words, "--overwrite", "--limit", "1"]) == 0
    assert len(Datastore.open(tmp_path / "out").tokens) < len(before[0])
    for array, kept in zip((opened.tokens, opened.suffixes), before):
        assert np.array_equal(array, kept)


def test_files_of_others_are_not_replaced_by_a_datastore(tmp_path, source, capsys):
    words = ["--dataset", str(source), "--tokenizer", TINY, "--output", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "starts.npy").write_text("mine")
    assert script.main(words) == 2
    assert "holds starts.npy, and no finished datastore; add --overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / "starts.npy").read_text() == "mine"
    assert script.main([*words[:-1], str(source)]) == 2


@pytest.mark.parametrize(
    "change,told",
    [
        ({"--dataset": "nowhere.json"}, "nowhere.json does not exist"),
        ({"--tokenizer": "nowhere"}, "--tokenizer nowhere is no tokenizer's folder"),
        ({"--limit": "0"}, "--limit must be at least 1; got 0; write for example 1"),
    ],
)
def test_the_script_says_what_is_wrong(tmp_path, source, capsys, change, told):
    words = {"--dataset": str(source), "--tokenizer": TINY, "--output": str(tmp_path / "out"), **change}
    assert script.main([word for pair in words.items() for word in pair]) == 2
    assert told in capsys.readouterr().err


def test_a_bad_row_stops_the_run_and_is_named(tmp_path, source, capsys):
    bad = rows(3)
    bad[1]["conversations"][1]["value"] = " "
    source.write_text(json.dumps(bad))
    assert script.main(["--dataset", str(source), "--tokenizer", TINY, "--output", str(tmp_path / "out")]) == 2
    assert "row 2: an empty answer (turn 2)" in capsys.readouterr().err
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_conversation_that_the_template_refuses_is_named_or_left_out(tmp_path, source, capsys):
    tokenizer = load_chat_tokenizer(TINY)
    refuse = "{% if messages[0].content == 'Refuse this.' %}{{ raise_exception('no such start') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    some = rows(3)
    some[1]["conversations"][0]["value"] = "Refuse this."
    source.write_text(json.dumps(some))
    words = ["--dataset", str(source), "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "out")]
    assert script.main(words) == 2
    assert "row 2: the chat template of" in (told := capsys.readouterr().err) and "or set skip_bad_rows" in told
    assert script.main([*words, "--skip_bad_rows"]) == 0
    assert Datastore.open(tmp_path / "out").manifest["conversations"] == 2


def test_a_question_without_an_answer_takes_no_thoughts_out_of_the_answer_before(tmp_path, source):
    tokenizer = load_chat_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|user|>' + m.content if m.role == 'user' else '<|assistant|>' + "
        "(m.content if loop.last else m.content.split('</think>')[-1]) + eos_token }}{% endfor %}"
    )
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Greet.</think>Hello."}]
    stored = []
    for more in ([], [{"from": "human", "value": "Why?"}]):
        source.write_text(json.dumps([{"conversations": [*turns, *more]}]))
        build_datastore(str(source), tokenizer, tmp_path / f"{len(more)}")
        stored.append(Datastore.open(tmp_path / f"{len(more)}").tokens.tolist()[:-1])  # without the separator
    assert stored[0] == stored[1] == tokenizer("<|user|>Hi<|assistant|>Greet.</think>Hello.</s>")["input_ids"]


def test_a_thought_that_the_template_drops_is_refused_or_counted_as_in_distillation(tmp_path, source, caplog):
    """As DeepSeek-R1's template drops it from every answer; here the last question's must be whole."""
    tokenizer = load_chat_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|user|>' + m.content if m.role == 'user' else '<|assistant|>' + "
        "m.content.split('</think>')[-1] + eos_token }}{% endfor %}"
    )
    ask, thinks, says = (
        {"from": "human", "value": "Hi"},
        *({"from": "gpt", "value": text} for text in ("Greet.</think>Hello.", "Hello.")),
    )
    source.write_text(json.dumps([{"conversations": [ask, thinks]}]))
    with pytest.raises(ValueError, match=r"leaves out at least \d+ characters of assistant turn 1"):
        build_datastore(str(source), tokenizer, tmp_path / "refused")
    source.write_text(json.dumps([{"conversations": [ask, thinks, ask, says]}]))
    build_datastore(str(source), tokenizer, tmp_path / "counted")
    assert "1 answers lack a part that the chat template leaves out, as thoughts" in caplog.text


def test_bad_rows_are_trimmed_and_listed_as_distillation_does(tmp_path, source, capsys):
    source.write_text(json.dumps(rows(3)))
    sound = build_datastore(str(source), load_chat_tokenizer(TINY), tmp_path / "sound")
    assert sound["bad_rows"] == []
    some = [*rows(3), {"id": "x"}]
    some[1]["conversations"] += [{"from": "human", "value": "What is </s>?"}, {"from": "gpt", "value": "An end."}]
    source.write_text(json.dumps(some))
    words = ["--dataset", str(source), "--tokenizer", TINY, "--output", str(tmp_path / "out"), "--skip_bad_rows"]
    assert script.main(words) == 0
    assert "2 bad rows trimmed or left out, listed in datastore.json" in " ".join(capsys.readouterr().out.split())
    store = Datastore.open(tmp_path / "out")
    assert store.tokens.tolist() == Datastore.open(tmp_path / "sound").tokens.tolist()
    assert [(bad["place"], bad["kept_turns"]) for bad in store.manifest["bad_rows"]] == [("row 4", 0), ("row 2", 2)]


@pytest.mark.parametrize("name", ["tokens.npy", "suffixes.npy", "starts.npy"])
def test_files_that_are_missing_or_cut_short_are_refused(store, name):
    whole = (store / name).read_bytes()
    (store / name).write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=f"{name} is damaged or cut short"):
        Datastore.open(store)
    (store / name).write_bytes(b"")
    with pytest.raises(ValueError, match=name):
        Datastore.open(store)
    for place in range(6, 128):  # of the header, which Python's tokenizer reads
        (store / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=f"{name} (is damaged|must hold|cannot be read)"):
            Datastore.open(store)
    np.savez(store / "archive.npz", np.arange(3))
    (store / "archive.npz").replace(store / name)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        Datastore.open(store)
    np.save(store / name, np.arange(3))
    with pytest.raises(ValueError, match=f"{name} must hold .* numbers of type"):
        Datastore.open(store)
    (store / name).unlink()
    with pytest.raises(ValueError, match=f"a datastore holds {name}"):
        Datastore.open(store)


@pytest.mark.parametrize("name", ["tokens", "suffixes", "starts"])
def test_damaged_contents_of_the_right_size_are_refused(store, name, caplog):
    path = store / f"{name}.npy"
    before = path.read_bytes()
    try:
        for place in (len(before) // 2, len(before) - 1):
            damaged = bytearray(before)
            damaged[place] ^= 1
            path.write_bytes(bytes(damaged))
            with pytest.raises(ValueError, match=f"{name}.npy is damaged: its checksum is .*copy the folder again"):
                Datastore.open(store)
    finally:
        path.write_bytes(before)
    manifest = json.loads((store / MANIFEST).read_text())
    older = {key: value for key, value in manifest.items() if key != "checksums"}
    try:
        (store / MANIFEST).write_text(json.dumps(older))
        assert Datastore.open(store).manifest == older
        assert "built without checksums" in caplog.text
    finally:
        (store / MANIFEST).write_text(json.dumps(manifest))
    assert Datastore.open(store)


def test_objects_are_never_unpickled(store):
    np.save(store / "tokens.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"tokens.npy is damaged"):
        Datastore.open(store)


@pytest.mark.parametrize(
    "change,told",
    [
        ({"format_version": 2}, "format_version 1; got 2"),
        ({"tokens": 0}, "tokens must be a positive whole number; got 0"),
        ({"depth": "deep"}, "depth must be a positive"),
    ],
)
def test_manifests_that_do_not_fit_are_refused(store, change, told):
    manifest = json.loads((store / MANIFEST).read_text())
    (store / MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(ValueError, match=told):
        Datastore.open(store)


def test_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match=f"a folder with {MANIFEST}.*No such file"):
        Datastore.open(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        Datastore.open(tmp_path)


def test_a_tokenizer_without_a_chat_template_takes_vicunas(tmp_path):
    tokenizer = load_chat_tokenizer(TINY)
    own = tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rendered = load_chat_tokenizer(str(tmp_path)).apply_chat_template(messages, tokenize=False)
    assert rendered.endswith(f"questions. USER: Hi ASSISTANT: Hello.{tokenizer.eos_token}")
    assert load_chat_tokenizer(TINY).chat_template == own


def test_rows_of_a_target_with_more_tokens_than_its_tokenizer(tmp_path, monkeypatch):
    """A padded vocabulary: the target may write ids that no token has; none is taken for a separator."""
    tokenizer = load_chat_tokenizer(TINY)
    rows = [np.array([5, len(tokenizer), 6]), np.array([len(tokenizer) + 4])]
    monkeypatch.setattr(datastore_build, "_conversation_tokens", lambda *given: (rows, 2, "digest", []))
    build_datastore("chats.json", tokenizer, tmp_path / "store")
    opened = Datastore.open(tmp_path / "store")
    separator = len(tokenizer) + 5
    assert opened.tokens.tolist() == [5, len(tokenizer), 6, separator, len(tokenizer) + 4, separator]
