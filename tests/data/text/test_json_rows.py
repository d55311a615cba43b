"""Rows of folders and of JSON with repeated keys: all that is there is read, or the file is named that is not."""

import csv
import gzip
import json
import os
from operator import attrgetter

import datasets
import pytest

from draft_heads.data.text.conversations import conversation_of, read_conversations
from draft_heads.data.text.json_files import MalformedJson, RepeatedKey, parse_json
from draft_heads.data.text.json_rows import read_rows

TWICE = '{"conversations": [{"from": "human", "value": "First", "value": "Second"}, {"from": "gpt", "value": "x"}]}'
GOOD = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]}


def folder(path, *files):
    """A folder with these files, each with one row that holds its name."""
    for name in files:
        file, row = path / name, {"name": name}
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            datasets.Dataset.from_list([row]).to_parquet(file)
        elif name.endswith(".gz"):
            file.write_bytes(gzip.compress(json.dumps(row).encode()))
        else:
            file.write_text(json.dumps(row))
    return path


def names(path, split=None, **how):
    return [row["name"] for _, row in read_rows(str(path), split, **how)]


@pytest.mark.parametrize(
    "files",
    [
        ("a.jsonl", "b.json", "more/c.jsonl.gz"),
        ("train.jsonl", "train-2.jsonl"),
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
        ("train/a.jsonl", "train/b.jsonl"),
    ],
)
def test_all_files_of_a_folder_are_read_and_what_holds_no_rows_is_passed_over(tmp_path, files):
    folder(tmp_path, *files)
    for name in ("NOTES.md", "README.md", "LICENSE.txt", ".cache/x.jsonl", "config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert sorted(names(tmp_path)) == sorted(files)
    assert sorted(names(tmp_path, "train")) == sorted(files)


@pytest.mark.parametrize(
    ("files", "unread"),
    [
        (("train.jsonl", "part2.jsonl"), "part2.jsonl would not be read beside train.jsonl"),
        (("data/train-00000-of-00001.parquet", "extra.parquet"), "extra.parquet would not be read beside data/train-0"),
        (("train/a.jsonl", "other/b.jsonl"), "other/b.jsonl would not be read beside train/a.jsonl"),
        (("a.jsonl", "B.JSONL"), "B.JSONL would not be read beside a.jsonl"),
        (("test.jsonl", *(f"{n}.jsonl" for n in range(9))), "0.jsonl, 1.jsonl, 2.jsonl, 6 more would not be read"),
    ],
)
def test_a_file_that_belongs_to_no_split_is_named(tmp_path, files, unread):
    folder(tmp_path, *files)
    for split in (None, "train"):
        with pytest.raises(ValueError, match=f"each file of rows in a folder belongs to a split; in .*, {unread}"):
            names(tmp_path, split)


def test_links_that_are_not_followed_are_named(tmp_path):
    folder(tmp_path / "elsewhere", "b.jsonl")
    folder(tmp_path / "rows", "a.jsonl")
    (tmp_path / "rows" / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"more would not be read beside a\.jsonl: .*move them out"):
        names(tmp_path / "rows")
    (tmp_path / "rows" / "more").unlink()
    (tmp_path / "rows" / "lost.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"lost\.jsonl would not be read beside a\.jsonl"):
        names(tmp_path / "rows")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert names(tmp_path / "link") == ["b.jsonl"]


@pytest.mark.parametrize(
    ("files", "received"),
    [
        (("a.jsonl", "b.jsonl", "c.parquet"), "JSON: a.jsonl, b.jsonl; parquet: c.parquet"),
        (("train.jsonl", "test.parquet"), "parquet: test.parquet; JSON: train.jsonl"),
        (("a.csv", "b.tsv"), "csv: a.csv; tsv: b.tsv"),
    ],
)
def test_formats_are_not_mixed_in_a_folder(tmp_path, files, received):
    with pytest.raises(ValueError, match=rf"in one format, .* has several \({received}\); convert the files"):
        names(folder(tmp_path, *files))


def test_files_that_the_readme_names_are_read_alone(tmp_path):
    folder(tmp_path, "train.jsonl", "part2.jsonl", "c.parquet")
    readme = "---\r\nlicense: mit\r\nconfigs:\r\n- config_name: default\r\n  data_files: part2.jsonl\r\n---\r\n"
    (tmp_path / "README.md").write_bytes(readme.encode())
    assert names(tmp_path) == ["part2.jsonl"]
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nconfigs:\n")
    with pytest.raises(ValueError, match="in one format"):
        names(tmp_path)


def test_the_splits_of_a_folder_that_are_not_read_are_logged(tmp_path, caplog):
    folder(tmp_path / "three", "train.jsonl", "test.jsonl", "validation.jsonl")
    for split, read, others in ((None, "test", "train, validation"), ("train", "train", "validation, test")):
        assert names(tmp_path / "three", split) == [f"{read}.jsonl"]
        assert caplog.messages == [f"{tmp_path / 'three'}: its split {read} is read, not {others}"]
        caplog.clear()
    assert names(folder(tmp_path / "one", "train.jsonl")) == ["train.jsonl"] and not caplog.messages


@pytest.mark.parametrize("name", ["rows.JSONL.GZ", "zipped.jsonl"])
def test_a_zipped_file_is_read_whatever_it_is_called(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(json.dumps({"name": "a"}).encode()))
    assert names(tmp_path / name) == ["a"]


def test_what_is_no_file_of_rows_is_told(tmp_path):
    pointer = tmp_path / "rows.json"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match=r"rows\.json is a pointer of Git LFS .*; run git lfs pull"):
        read_conversations(str(pointer), skip_bad_rows=True)
    with pytest.raises(FileNotFoundError, match=r"rows2\.ndjson does not exist"):
        names("rows2.ndjson")


def test_a_configuration_and_a_split_are_read_by_name(tmp_path):
    readme = "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files:\n"
    (tmp_path / "README.md").write_text(f"{readme}  - split: train_sft\n    path: b.jsonl\n---\n")
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name, **GOOD}))
    assert read_conversations(str(tmp_path), config="a").dataset["id"] == ["a"]
    assert read_conversations(str(tmp_path), "train_sft", config="b").dataset["id"] == ["b"]
    for config, told in ((None, "Config name is missing"), ("c", "BuilderConfig 'c' not found")):
        with pytest.raises(ValueError, match=rf"configurations: {told}.*'a', 'b'.*; name one with --dataset_config"):
            read_conversations(str(tmp_path), config=config)
    with pytest.raises(ValueError, match="has no split 'train'; it has: train_sft"):
        read_conversations(str(tmp_path), config="b")


@pytest.mark.parametrize("usual", ["b", "default"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_configuration_that_is_read_without_its_name_is_told(tmp_path, caplog, kind, usual):
    """As hermes-function-calling-v1 has one of five that is read where none is named."""
    names = f"- config_name: a\n  data_files: a.{kind}\n- config_name: {usual}\n  data_files: b.{kind}\n"
    readme = f"---\nconfigs:\n{names}"
    (tmp_path / "README.md").write_text(readme + "  default: true\n---\n")
    for name in "ab":
        rows = datasets.Dataset.from_list([{"id": name, **GOOD}])
        rows.to_json(tmp_path / f"{name}.jsonl")
        rows.to_parquet(tmp_path / f"{name}.parquet")
    for config, read, told in ((None, "b", 1), (usual, "b", 0), ("a", "a", 0)):
        caplog.clear()
        assert read_conversations(str(tmp_path), config=config).dataset["id"] == [read]
        assert (
            caplog.text.count(f"{tmp_path}: its configuration {usual} is read; --dataset_config names another") == told
        )


@pytest.mark.parametrize("form", ["saved", "saved dict", "folder"])
def test_a_local_copy_of_a_benchmark_may_have_another_split_alone_or_none(tmp_path, form, caplog):
    """The split of its description is that of the hub's dataset."""
    rows, copy = [{"name": "a"}, {"name": "b"}], tmp_path / "copy"
    if form == "folder":
        copy.mkdir()
        (copy / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        saved = datasets.Dataset.from_list(rows)
        (saved if form == "saved" else datasets.DatasetDict({"test": saved})).save_to_disk(copy)
    assert names(copy, "validation", is_copy=True) == ["a", "b"]
    assert ("has no split validation: its split test is read" in caplog.text) == (form != "saved")
    for option in (None, "--dataset"):  # a description of one's own names its own split
        with pytest.raises(ValueError, match=r"has no split 'validation'|without splits; got split validation"):
            names(copy, "validation", option=option)
    if form == "folder":
        (copy / "train.jsonl").write_text('{"name": "c"}\n')
        with pytest.raises(ValueError, match="has no split 'validation'; it has: "):
            names(copy, "validation", is_copy=True)


def test_texts_that_datasets_keeps_as_json_are_refused_and_read_from_their_folder(tmp_path, monkeypatch):
    """Texts in some rows and parts in others: the quotes of an answer in quotes would be gone."""
    title, parts = '"The Silent Sea"', [{"type": "text", "text": "Hi"}]
    rows = [[{"role": "user", "content": "A title?"}, {"role": "assistant", "content": title}]]
    rows += [[{"role": "user", "content": parts}, {"role": "assistant", "content": "42"}]]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "set" / "train.jsonl"), cache_dir=str(tmp_path))
    assert [turn["content"] for turn in loaded["train"][0]["messages"]] == ["A title?", title.strip('"')]
    monkeypatch.setattr(datasets, "load_dataset", lambda source, **_: loaded)
    with pytest.raises(
        ValueError, match=r"someone/set has texts beside other values under 'content', .* pass their fo"
    ):
        list(read_rows("someone/set"))
    assert [row["messages"] for _, row in read_rows(str(tmp_path / "set"))] == rows


def test_a_dataset_with_a_script_is_refused_in_a_sentence(tmp_path, monkeypatch):
    def of_a_script(source, **_):
        raise RuntimeError("Dataset scripts are no longer supported, but found samsum.py")

    monkeypatch.setattr(datasets, "load_dataset", of_a_script)
    with pytest.raises(ValueError, match=r"someone/samsum is no hub id with rows of one form \(Dataset scripts are no"):
        names("someone/samsum")


@pytest.mark.parametrize("source", ["rows.jsonl", "https://example.org/rows.jsonl"])
@pytest.mark.parametrize(("name", "further"), [("split", {"split": "test"}), ("dataset_config", {"config": "a"})])
def test_a_file_has_neither_splits_nor_configurations(tmp_path, monkeypatch, source, name, further):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(
        ValueError, match=rf"^{name} names a part of a dataset, and {source} is a file; got '\w+'; leave"
    ):
        read_conversations(source, **further)


@pytest.mark.parametrize(("option", "remedy"), [(None, "NAME=FILE"), ("--dataset", "--dataset FILE")])
def test_a_url_that_cannot_be_read_is_told_with_the_option_that_takes_a_copy(option, remedy):
    with pytest.raises(ValueError, match=rf"cannot be read .*; copy the file here and pass it as {remedy}$"):
        list(read_rows("http://127.0.0.1:9/rows.jsonl", option=option))


# ---- keys that an object has twice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (TWICE, "value"),
        ('{"conversations": [], "conversations": [{"from": "human", "value": "a"}]}', "conversations"),
        ('[{"a": 1}, {"b": {"c": 1, "d": 2, "c": 1}}]', "c"),
        ('{"a": 1, "\\u0061": 2}', "a"),
    ],
)
def test_a_key_that_an_object_has_twice_is_named(text, key):
    with pytest.raises(RepeatedKey, match=f"^an object has a key twice: '{key}'; keep one of them$"):
        parse_json(text)
    assert parse_json('{"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}') == {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}


@pytest.mark.parametrize(("form", "place"), [("lines", "line 2"), ("array", "row 2")])
def test_a_row_with_a_key_twice_is_a_bad_row_and_those_after_it_are_read(tmp_path, form, place):
    rows, file = [json.dumps(GOOD), TWICE, json.dumps(GOOD)], tmp_path / "rows.json"
    file.write_text("\n".join(rows) if form == "lines" else f"[{', '.join(rows)}]")
    with pytest.raises(ValueError, match=rf"rows\.json, {place}: an object has a key twice \('value'; keep one"):
        read_conversations(str(file))
    loaded = read_conversations(str(file), skip_bad_rows=True)
    assert len(loaded.dataset) == 2
    assert [(bad.place, bad.reason, bad.outcome) for bad in loaded.bad_rows] == [
        (place, "an object has a key twice", "dropped")
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"[{json.dumps(GOOD)}, {TWICE}]", "row 2 of split train (a.json, row 2)"),
        (TWICE, "row 1 of split train (a.json, line 1)"),
        (f"{json.dumps(GOOD)}\n{TWICE}", "row 2 of split train (a.json, line 2)"),
    ],
)
def test_a_malformed_row_of_a_folders_file_is_one_row_as_in_the_file_alone(tmp_path, text, reason):
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text(json.dumps(GOOD))
    (told,) = ((place, str(row)) for place, row in read_rows(str(tmp_path)) if isinstance(row, MalformedJson))
    assert told == (reason, "an object has a key twice: 'value'; keep one of them")
    assert sum(row == GOOD for _, row in read_rows(str(tmp_path))) == 1 + (text != TWICE)


def test_an_empty_file_beside_others_of_a_folder_is_fine(tmp_path):
    (folder(tmp_path, "a.jsonl") / "b.jsonl").write_text("")
    assert names(tmp_path) == ["a.jsonl"]


# ---- a folder reads as its files do ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [{"x": {"type": "integer", "default": 1}, "y": None}, {"y": "a", "x": {"default": 1.5, "type": "number"}}],
        [{"day": "2024-05-01"}, {"day": "2024-05-02T10:00:00"}],
        [{"x": 1}, {"x": "one"}, {"x": [1]}],
    ],
    ids=["numbers and order", "dates", "types"],
)
def test_rows_of_a_folder_are_those_of_its_files(tmp_path, rows):
    (tmp_path / "train-1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "train-2.json").write_text(json.dumps(rows))
    places, found = zip(*read_rows(str(tmp_path)))
    assert json.dumps(found) == json.dumps(rows * 2)  # the order of keys, and 1 apart from 1.0
    assert places == tuple(f"row {number} of split train" for number in range(1, 2 * len(rows) + 1))


def test_arrow_rows_are_without_the_keys_of_other_rows(tmp_path):
    datasets.Dataset.from_list([{"a": {"b": 1}}, {"a": {"c": 2}}]).to_parquet(tmp_path / "train.parquet")
    assert [row for _, row in read_rows(str(tmp_path))] == [{"a": {"b": 1}}, {"a": {"c": 2}}]


def test_arrow_columns_of_json_keep_their_nulls(tmp_path):
    calls = [{"arguments": {"city": None, "days": 3}}, {"arguments": {"city": ["Rome"]}}]  # what no Arrow type holds
    rows = [{"calls": [call], "schema": {"x": {"default": None}}} for call in calls]
    form = {"calls": datasets.List({"arguments": datasets.Json()}), "schema": datasets.Json()}
    table = datasets.Dataset.from_dict(
        {key: [row[key] for row in rows] + [None] for key in form}, features=datasets.Features(form)
    )
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet").mkdir()
    table.to_parquet(tmp_path / "parquet" / "train.parquet")
    for folder_of_rows in ("saved", "parquet"):
        assert [row for _, row in read_rows(str(tmp_path / folder_of_rows))] == [*rows, {}]


@pytest.mark.parametrize(("name", "between"), [("train.csv", ","), ("train.tsv", "\t")])
def test_cells_of_csv_are_texts_as_they_are_written(tmp_path, name, between):
    cells = [["prompt", "system", "weight"], ["NA", "N/A", "1.0"], ["null", "", "1"], ["007", "None", "true"]]
    (tmp_path / name).write_text("\n".join(between.join(line) for line in cells))
    assert [row for _, row in read_rows(str(tmp_path))] == [dict(zip(cells[0], line)) for line in cells[1:]]
    found = map(conversation_of, read_conversations(str(tmp_path), asked=attrgetter("key")).dataset)
    assert [[turn["content"] for turn in messages] for messages, _ in found] == [
        ["N/A", "NA"],
        ["null"],
        ["None", "007"],
    ]


def test_a_broken_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n{")
    (_, _), (place, row) = read_rows(str(tmp_path))
    assert place == "row 2 of split train (a.jsonl, line 2)" and str(row).startswith("malformed JSON: ")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("prompt\na\nb,c\n")
    with pytest.raises(ValueError, match=r"train\.csv cannot be read as CSV .*; mend it, or write its rows as JSONL"):
        list(read_rows(str(tmp_path / "csv")))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("train.tsv", ["de\ten", '"Hallo" sagte er\tHe said hello']),  # was `Hallo sagte er`
        ("train.tsv", ["de\ten", '"Ja\tYes', "Nein\tNo", '"Gut"\tGood']),  # was one row
        ("train.tsv", ["de\ten", "Nein\tNo", '"Ja\tYes']),
        ("train.csv", ["instruction,output", "Say hi,Hi,", "Say bye,Bye,"]),  # was Hi, with an empty output
    ],
    ids=["quotes within", "closed lines later", "never closed", "more than the header"],
)
def test_csv_whose_cells_are_not_what_is_written_is_refused(tmp_path, name, lines):
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"{name} cannot be read as CSV .*; mend it, or write its rows as JSONL"):
        list(read_rows(str(tmp_path)))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quoted_cells_of_csv_hold_any_text(tmp_path, end):
    rows = [
        {"prompt": 'a "q", b', "system": "x\ny\r\nz"},
        {"prompt": "w" * 200_000, "system": '"\u2028\\"'},
        {"prompt": " s ", "system": ""},
    ]
    with (tmp_path / "train.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "system"], lineterminator=end)
        writer.writeheader()
        writer.writerows(rows)
        file.write(f"cut short{end}")
    assert [row for _, row in read_rows(str(tmp_path))] == [*rows, {"prompt": "cut short", "system": ""}]


def test_a_file_of_a_folders_format_may_be_read_in_a_folder(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="write its rows as JSONL, or pass a folder with such files alone"):
        names(tmp_path / "a.parquet")


@pytest.mark.parametrize("place", ["data/train.parquet", ".hidden/train.parquet", "../elsewhere/train.parquet"])
def test_a_file_of_a_folder_that_was_replaced_is_read_anew_whatever_its_time(tmp_path, place):
    """Archives, images of containers and `rsync -a` set times; `datasets` names its copies by them."""
    home = tmp_path / "rows"
    home.mkdir()
    file = (home / place).resolve()
    file.parent.mkdir()
    if place[0] == ".":
        (home / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {place}\n---\n")
    for text in ("first", "second"):
        datasets.Dataset.from_list([{"a": text}]).to_parquet(file)
        os.utime(file, (0, 0))
        assert [row for _, row in read_rows(str(home))] == [{"a": text}]
