"""Folders of rows: all of them are read, and each once."""

import gzip
import json

import datasets
import pytest

from draft_heads.data.text.json_rows import read_rows


@pytest.mark.parametrize("copy", ["train.jsonl.gz", "train.jsonl.bak"])
def test_a_file_and_its_copy_in_a_folder_are_not_both_read(tmp_path, copy):
    line = json.dumps({"messages": []}).encode() + b"\n"
    (tmp_path / "train.jsonl").write_bytes(line)
    (tmp_path / copy).write_bytes(gzip.compress(line) if copy.endswith("gz") else line)
    with pytest.raises(ValueError, match=f"train.jsonl and {copy} would both be read"):
        list(read_rows(str(tmp_path), "train"))
    (tmp_path / copy).rename(tmp_path / copy.replace("train", "train-2"))
    assert len(list(read_rows(str(tmp_path), "train"))) == 2


def test_parts_that_are_missing_are_told_by_the_names_of_the_others(tmp_path):
    table = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "Hi"}]}])
    for part in (0, 2):
        table.to_parquet(tmp_path / f"train-{part:05d}-of-00003.parquet")
    with pytest.raises(ValueError, match=r"the names of train… tell of 3, and 2 are there; fetch the others"):
        list(read_rows(str(tmp_path), "train"))
    table.to_parquet(tmp_path / "train-00001-of-00003.parquet")
    table.to_parquet(tmp_path / "test-00000-of-00001.parquet")
    assert len(list(read_rows(str(tmp_path), "train"))) == 3


def test_columns_that_a_saved_dataset_does_not_format_are_read(tmp_path):
    """`set_format(columns=…)` is saved with the data, and would leave the others out."""
    rows = [{"system": "In French.", "messages": [{"role": "user", "content": "Hi"}]}] * 2
    table = datasets.Dataset.from_list(rows)
    table.set_format(columns=["messages"])
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "several")
    assert set(datasets.load_from_disk(tmp_path / "one")[0]) == {"messages"}
    for folder in ("one", "several"):
        assert [row for _, row in read_rows(str(tmp_path / folder), "train")] == rows
