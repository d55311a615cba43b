"""Folders of rows: all of them are read, and each once."""

import gzip
import json
import zipfile

import datasets
import pytest

from draft_heads.data.text.json_rows import read_rows


@pytest.mark.parametrize("copy", ["train.jsonl.gz", "train.jsonl.BAK", "train.jsonl.mine", "train.jsonl.2026-11-29"])
def test_a_file_and_its_copy_in_a_folder_are_not_both_read(tmp_path, copy):
    line = json.dumps({"messages": []}).encode() + b"\n"
    (tmp_path / "train.jsonl").write_bytes(line)
    (tmp_path / copy).write_bytes(gzip.compress(line) if copy.endswith("gz") else line)
    with pytest.raises(ValueError, match=f"train.jsonl and {copy} would both be read"):
        list(read_rows(str(tmp_path), "train"))
    (tmp_path / copy).rename(tmp_path / copy.replace("train", "train-2"))
    assert len(list(read_rows(str(tmp_path), "train"))) == 2


@pytest.mark.parametrize(
    "name", ["{split}-{part:05d}-of-{of:05d}.parquet", "{split}-{part:05d}-of-{of:05d}-a09b74b3ef9c3b56.parquet"]
)
@pytest.mark.parametrize("configs", [False, True])
def test_parts_that_are_missing_are_told_by_the_names_of_the_others(tmp_path, name, configs):
    """As of a download that broke off; folders of the hub say in README.md which files are those of a split."""
    table = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "Hi"}]}])
    if configs:
        header = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
        (tmp_path / "README.md").write_text(f"---\n{header}---\n")
    (tmp_path / "data").mkdir()

    def write(split, part, of):
        table.to_parquet(tmp_path / "data" / name.format(split=split, part=part, of=of))

    write("train", 0, 3)
    write("train", 2, 3)
    with pytest.raises(ValueError, match=r"the names of train… tell of 3 parts, and 2 are there .*; fetch the others"):
        list(read_rows(str(tmp_path), "train"))
    write("train", 1, 3)
    if not configs:
        write("test", 0, 2)  # which is not read
    assert len(list(read_rows(str(tmp_path), "train"))) == 3
    write("train", 0, 1)
    with pytest.raises(ValueError, match="tell of 1 parts and 3 parts, and 4 are there"):
        list(read_rows(str(tmp_path), "train"))


def test_two_copies_of_a_part_by_its_number_are_told(tmp_path):
    line = json.dumps({"messages": []}) + "\n"
    for name in ("log.json", "log.json.1", "log.json.2.gz"):  # as log files are rotated
        (tmp_path / name).write_bytes(gzip.compress(line.encode()) if name.endswith("gz") else line.encode())
    assert len(list(read_rows(str(tmp_path), "train"))) == 3
    (tmp_path / "log.json.1.gz").write_bytes(gzip.compress(line.encode()))
    with pytest.raises(ValueError, match=r"log\.json\.1 and log\.json\.1\.gz would both be read"):
        list(read_rows(str(tmp_path), "train"))


@pytest.mark.parametrize("unread", ["train-00001-of-00002.jsonl.crdownload", "train-00001-of-00002.jsonl"])
def test_a_part_is_there_when_it_is_read_and_not_empty(tmp_path, unread):
    header = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: train-*.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{header}---\n")
    (tmp_path / "train-00000-of-00002.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    (tmp_path / unread).write_text("" if unread.endswith("jsonl") else "{")
    with pytest.raises(ValueError, match="tell of 2 parts, and 1 are there"):
        list(read_rows(str(tmp_path), "train"))


@pytest.mark.parametrize("split", [None, "test"])
def test_a_whole_split_is_read_beside_one_with_missing_parts(tmp_path, split):
    for name in ("train-00000-of-00002.jsonl", "test-00000-of-00001.jsonl"):
        (tmp_path / name).write_text(json.dumps({"messages": [], "id": name}) + "\n")
    assert [record["id"] for _, record in read_rows(str(tmp_path), split)] == ["test-00000-of-00001.jsonl"]


def test_parts_of_compressed_json_are_counted_and_one_with_two_names_is_a_copy(tmp_path):
    line = json.dumps({"messages": []}).encode() + b"\n"
    (tmp_path / "c4-train.00000-of-00002.json.gz").write_bytes(gzip.compress(line))
    (tmp_path / "c4-train.00001-of-00002.md5").write_text("1f")
    with pytest.raises(ValueError, match="the names of c4-train… tell of 2 parts, and 1 are there"):
        list(read_rows(str(tmp_path), "train"))
    (tmp_path / "c4-train.00001-of-00002.json.GZ").write_bytes(gzip.compress(line))
    assert len(list(read_rows(str(tmp_path), "train"))) == 2
    (tmp_path / "c4-train.00001-of-00002-1f.json.gz").write_bytes(gzip.compress(line))
    with pytest.raises(ValueError, match="would both be read"):
        list(read_rows(str(tmp_path), "train"))


def test_parts_of_an_export_that_have_a_format_in_their_names_are_not_copies(tmp_path):
    line = json.dumps({"messages": []}) + "\n"
    for part in (1, 2):
        (tmp_path / f"conv.json.part{part}.jsonl").write_text(line)
        (tmp_path / f"log.json.{part}.gz").write_bytes(gzip.compress(line.encode()))
    assert len(list(read_rows(str(tmp_path), "train"))) == 4


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


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_texts_in_an_archive_which_datasets_reads_otherwise_are_refused(tmp_path, name):
    row = json.dumps({"prompt": "NA"}) if name.endswith("jsonl") else "prompt\nNA"
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr(name, row + "\n")
    with pytest.raises(ValueError, match=r"in an archive, .*train.zip, would not be: .*; unpack it"):
        list(read_rows(str(tmp_path), "train"))
    with zipfile.ZipFile(tmp_path / "train.zip") as archive:
        archive.extractall(tmp_path)
    (tmp_path / "train.zip").unlink()
    assert [record for _, record in read_rows(str(tmp_path), "train")] == [{"prompt": "NA"}]
