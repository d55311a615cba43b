"""A head's folder: what is written, read back, carried on and sent to a hub."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import xxhash
import yaml
from huggingface_hub import metadata_load

from draft_heads.heads import base, checkpoint, load_head
from draft_heads.heads.card import is_hub_id, shared, target_licence, without_folders
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.heads.config import FORMAT_VERSION
from tests.heads.small import disturbed

PROVENANCE = {
    "command": "deepspeed train/ctc.py --target some/target",
    "steps": 1200,
    "minutes": 9.5,
    "data": [{"name": "chats.jsonl", "fingerprint": "f00", "counts": {"rows": 2997, "trained_tokens": 283609}}],
    "metrics": {"eval_simulated_beta": 2.5, "eval_accuracy_1": 0.75, "eval_seconds": 3.0},
    "target_licence": "apache-2.0",
}

BOTH, WHOLE = ("tokenizer_hash", "chat_template_hash"), ", with another tokenizer or another chat template"


def make_head(kind="ctc", **settings):
    head_type, config = head_classes(kind)
    settings = {"target": "some/target", "target_layers": config.usual_layers(4), **settings}
    return disturbed(head_type, config, **settings)


def same(one, other):
    other = other.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_and_its_history_survive_two_folders(tmp_path, kind):
    head = make_head(kind)
    head.save_pretrained(tmp_path / "one", PROVENANCE)
    read = load_head(tmp_path / "one")
    read.save_pretrained(tmp_path / "two")
    again = load_head(tmp_path / "two")
    assert type(again) is type(head) and same(head, again) and again.config == head.config
    assert again.provenance == PROVENANCE
    for name in ("config.json", "provenance.json", "README.md", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_weights_that_are_not_those_that_were_written_are_refused(tmp_path):
    """A flipped bit, or the weights of another head of this shape; older heads have no checksum."""
    for name in ("one", "two"):
        head = make_head()
        with torch.no_grad():
            next(head.parameters()).mul_({"one": 1, "two": 2}[name])
        head.save_pretrained(tmp_path / name, PROVENANCE)
    weights = tmp_path / "one" / "model.safetensors"
    own = weights.read_bytes()
    flipped = bytearray(own)
    flipped[-3] ^= 1
    for other in (bytes(flipped), (tmp_path / "two" / "model.safetensors").read_bytes()):
        weights.write_bytes(other)
        with pytest.raises(ValueError, match=r"has other content than provenance\.json says.*copy the folder again"):
            load_head(tmp_path / "one")
    weights.write_bytes(own)
    assert load_head(tmp_path / "one").provenance == PROVENANCE
    weights.write_bytes(bytes(flipped))
    (tmp_path / "one" / "provenance.json").write_text(json.dumps(PROVENANCE))
    assert load_head(tmp_path / "one").provenance == PROVENANCE


def test_an_older_checksum_is_compared_where_its_package_is_and_not_written_again(tmp_path, monkeypatch):
    head, folder = make_head(), tmp_path / "head"
    head.save_pretrained(folder, PROVENANCE)
    right = xxhash.xxh3_64((folder / "model.safetensors").read_bytes()).hexdigest()
    path = folder / "provenance.json"
    path.write_text(json.dumps({**PROVENANCE, "checksum_of_weights": right}))
    loaded = load_head(folder)
    loaded.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "provenance.json").read_text())
    assert loaded.provenance == PROVENANCE and "checksum_of_weights" not in written
    path.write_text(json.dumps({**PROVENANCE, "checksum_of_weights": "0" * 16}))
    with pytest.raises(ValueError, match=rf"says \(checksum_of_weights {right}, not 0{{16}}\): it is damaged"):
        load_head(folder)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert load_head(folder).provenance == PROVENANCE


def test_the_card_says_what_hubs_and_people_read(tmp_path):
    make_head().save_pretrained(tmp_path, PROVENANCE)
    card = (tmp_path / "README.md").read_text()
    assert metadata_load(tmp_path / "README.md") == {
        "base_model": "some/target",
        "library_name": "draft-heads",
        "license": "apache-2.0",
        "tags": ["speculative-decoding", "draft-head", "ctc"],
    }
    for words in (
        *(
            "deepspeed train/ctc.py --target some/target",
            "1,200 steps",
            "of chats.jsonl (fingerprint f00)",
            "apache-2.0",
        ),
        *("| simulated β | 2.5 |", "| top-1 accuracy at offset 0 | 0.75 |", 'Target.from_pretrained("some/target")'),
    ):
        assert words in card, words
    assert "seconds" not in card


def test_the_card_of_a_local_target_names_no_base_model(tmp_path):
    make_head(target="tests/tiny_target").save_pretrained(tmp_path, {"imported_from": "elsewhere"})
    metadata = metadata_load(tmp_path / "README.md")
    assert "base_model" not in metadata
    card = (tmp_path / "README.md").read_text()
    assert "Read from elsewhere." in card and "look it up" in card


def test_the_card_of_an_imported_head_has_no_licence_that_is_the_targets(tmp_path):
    given = {"target_licence": {"license": "apache-2.0"}}
    for folder, origin, told in (("a", {}, "apache-2.0"), ("b", {"imported_from": "elsewhere"}, None)):
        make_head(target="some/target").save_pretrained(tmp_path / folder, {**given, **origin})
        assert metadata_load(tmp_path / folder / "README.md").get("license") == told
        assert "under the licence apache-2.0" in (tmp_path / folder / "README.md").read_text()


@pytest.mark.parametrize(
    "fields, refused", [((), ""), (("tokenizer_hash",), ", with another tokenizer"), (BOTH, WHOLE)]
)
def test_the_card_names_what_is_compared_with_a_target(tmp_path, fields, refused):
    """An imported head does not say which chat template it was trained on."""
    make_head(target_fingerprint=dict.fromkeys(fields, "f00")).save_pretrained(tmp_path)
    assert f"A target of other sizes{refused} is refused" in " ".join((tmp_path / "README.md").read_text().split())


def test_where_the_target_is_a_folder_is_what_the_provenance_says(tmp_path, monkeypatch):
    """A head that is uploaded from another folder, where its target's relative path leads nowhere."""
    assert is_hub_id("some/target") and not is_hub_id("tests/tiny_target") and not is_hub_id("tests/missing")
    make_head(target="tests/tiny_target").save_pretrained(tmp_path / "head", {**PROVENANCE, "base_model": ""})
    monkeypatch.chdir(tmp_path)
    load_head("head").save_pretrained("again")
    assert "base_model" not in metadata_load(tmp_path / "again" / "README.md")


def test_a_head_that_is_written_over_another_is_none_until_it_is_whole(tmp_path, monkeypatch):
    make_head().save_pretrained(tmp_path)
    monkeypatch.setattr(base, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        make_head("medusa").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"needs config\.json"):
        load_head(tmp_path)


def test_the_card_has_no_path_of_the_machine(tmp_path):
    command = "python train/ctc.py --target /home/me/models/tiny --dataset '/data/a b' --config=/etc/x.yaml"
    known = {**PROVENANCE, "command": command}
    make_head(target="/home/me/models/tiny").save_pretrained(tmp_path, known)
    card = (tmp_path / "README.md").read_text()
    assert "/home" not in card and "/etc" not in card and "base_model" not in card
    assert shared("a=/a/b,/c/d") == "a=b,d"
    command = "python train/ctc.py --target '/home/Jane Doe/models/tiny' --dataset /mnt/a,b/data --base_url http://a/b"
    wanted = "python train/ctc.py --target tiny --dataset data --base_url http://a/b"
    known_of = {"command": command, "options": {"target": "/home/Jane Doe/tiny", "layers": [1, "/a b/c"], "x": "a b/c"}}
    found = {"command": wanted, "options": {"target": "tiny", "layers": [1, "c"], "x": "a b/c"}}
    assert without_folders(known_of) == found
    aio = {"zero_optimization": {"offload_param": {"nvme_path": "/mnt/Jane Doe/swap"}}, "steps": [1, 2.5]}
    in_json = without_folders(f"deepspeed train/ctc.py --deepspeed '{json.dumps(aio)}' --x '[broken /a'", "command")
    aio["zero_optimization"]["offload_param"]["nvme_path"] = "swap"
    assert shlex.split(in_json)[2:] == ["--deepspeed", json.dumps(aio), "--x", "[broken /a"]
    make_head(target="/home/Jane Doe/models/tiny").save_pretrained(tmp_path, {**known, "command": command})
    assert wanted in (tmp_path / "README.md").read_text() and "Doe" not in (tmp_path / "README.md").read_text()
    make_head(target="/home/me/models/tiny").save_pretrained(tmp_path, known)
    assert "train/ctc.py --target tiny" in card and "--config=x.yaml" in card and 'from_pretrained("tiny")' in card
    make_head().save_pretrained(tmp_path, {"imported_from": "/home/me/head"})
    assert "Read from head." in (tmp_path / "README.md").read_text()


def test_the_licence_is_the_one_of_the_targets_card(tmp_path):
    assert target_licence(str(tmp_path)) is None and target_licence("no/such-target") is None
    assert target_licence("data/tiny_target") == {"license": "apache-2.0"}
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# A model\n")
    assert target_licence(str(tmp_path)) == {"license": "mit"}
    (tmp_path / "README.md").write_text("# A model\n")
    assert target_licence(str(tmp_path)) == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"target_licence": {}}, "under a licence that its card does not name; look it up."),
        ({"target_licence": None}, "under the licence of its card, which was not read here; look it up."),
        ({}, "under the licence of its card, which was not read here; look it up."),
    ],
)
def test_a_targets_card_that_was_not_read_is_not_said_to_name_no_licence(given, told, tmp_path):
    """As on a machine without network, where the target's weights alone are in the cache."""
    make_head(target="hub/target").save_pretrained(tmp_path, given)
    card = (tmp_path / "README.md").read_text()
    assert f"The target is {told}" in " ".join(card.split()) and "license" not in metadata_load(tmp_path / "README.md")


OTHER = "license: other\nlicense_name: small\n"


@pytest.mark.parametrize(
    ("target", "given", "written", "named"),
    [
        ("hub/target", "license: mit\n", "license: mit\n", "licence mit."),
        ("hub/target", "license: [mit, apache-2.0]\n", "license:\n- mit\n- apache-2.0\n", "licence mit or apache-2.0."),
        ("hub/target", OTHER + "license_link: https://a/b\n", OTHER + "license_link: https://a/b\n", "licence small."),
        ("/a/target", OTHER + "license_link: LICENSE\n", OTHER, "licence small."),
        (
            "hub/target",
            OTHER + "license_link: LICENSE\n",
            OTHER + "license_link: https://huggingface.co/hub/target/blob/main/LICENSE\n",
            "licence small.",
        ),
    ],
)
def test_a_card_has_all_that_is_said_of_a_licence(target, given, written, named, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{given}---\n")
    licence = target_licence(str(tmp_path))
    make_head(target=target).save_pretrained(tmp_path / "head", {**PROVENANCE, "target_licence": licence})
    card = (tmp_path / "head" / "README.md").read_text()
    said, wanted = metadata_load(tmp_path / "head" / "README.md"), yaml.safe_load(written)
    assert {key: value for key, value in said.items() if key.startswith("license")} == wanted
    assert f"The target is under the {named}" in " ".join(card.split())


def test_files_of_every_version_are_read_and_of_a_newer_one_refused(tmp_path, monkeypatch):
    head = make_head()
    head.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("format_version") == FORMAT_VERSION
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert same(head, load_head(tmp_path))
    for newer in (FORMAT_VERSION + 1, "two"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "format_version": newer}))
        with pytest.raises(ValueError, match=rf"of at most {FORMAT_VERSION}; it has '?{newer}'?; update draft-heads"):
            load_head(tmp_path)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 3)
    config["slots"] = config.pop("frames")
    migrations = [*checkpoint.MIGRATIONS, lambda values: {"frames": values.pop("slots"), **values}]
    monkeypatch.setattr(checkpoint, "MIGRATIONS", migrations)
    (tmp_path / "config.json").write_text(json.dumps({**config, "format_version": 2}))
    assert load_head(tmp_path).config == head.config


def test_a_head_with_deleted_options_loads_where_they_had_their_defaults(tmp_path):
    head = make_head()
    head.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"format_version": 1}
    deleted = {"blocks": 1, "open_windows": False}
    (tmp_path / "config.json").write_text(json.dumps({**config, **deleted}))
    assert same(head, load_head(tmp_path))
    for name, value in (("blocks", 2), ("open_windows", True)):
        (tmp_path / "config.json").write_text(json.dumps({**config, **deleted, name: value}))
        with pytest.raises(ValueError, match=f"{name} of a CTC head must be .* got {json.dumps(value)}; "):
            load_head(tmp_path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"format_version": 1.0}, "format_version of at most 2; it has 1.0"),
        ({"kind": ["ctc"]}, r"name the head's kind; got \['ctc'\]"),
        ({"kind": "new"}, "unknown head kind 'new'"),
        ({"hidden_size": "x"}, "hidden_size must be of type int; got 'x'"),
        ({"target_layers": ["a"]}, r"target_layers must be of type list\[int\]; got \['a'\]"),
        ({"hidden_size": -3}, "negative dimension"),
        *(({name: None}, f"every size of the head; it has no {name}") for name in ("rope_theta", "token_scale")),
        (None, "is damaged .it holds a list, not an object"),
    ],
)
def test_a_malformed_config_gets_a_sentence_with_its_name(tmp_path, changed, told):
    make_head().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config = {name: value for name, value in {**config, **(changed or {})}.items() if value is not None}
    path.write_text(json.dumps(["ctc"] if changed is None else config))
    with pytest.raises(ValueError, match=f"^{path}.*{told}"):
        load_head(tmp_path)


class FakeHub:
    """What a hub keeps of what is sent to it."""

    def __init__(self, folder):
        self.folder = folder

    def create_repo(self, repo_id, private, exist_ok):
        assert exist_ok
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        (self.folder / repo_id / "private").write_text(str(private))

    def upload_folder(self, repo_id, folder_path):
        shutil.copytree(folder_path, self.folder / repo_id / "main", dirs_exist_ok=True)
        return f"https://hub/{repo_id}"

    def snapshot_download(self, repo_id):
        if not (self.folder / repo_id).is_dir():
            raise OSError(f"404: {repo_id}")
        return str(self.folder / repo_id / "main")


def test_a_head_goes_to_the_hub_and_back(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(base, "HfApi", lambda: hub)
    monkeypatch.setattr(checkpoint, "snapshot_download", hub.snapshot_download)
    head = make_head("medusa")
    head.save_pretrained(tmp_path / "head", PROVENANCE)
    mine = load_head(tmp_path / "head")
    mine.provenance = {**PROVENANCE, "options": {"dataset": ["/home/me/chats", "b"]}}
    assert mine.push_to_hub("me/medusa") == "https://hub/me/medusa"
    assert (hub.folder / "me/medusa/private").read_text() == "True"
    back = load_head("me/medusa")
    assert same(head, back) and back.provenance == {**PROVENANCE, "options": {"dataset": ["chats", "b"]}}
    card = (hub.folder / "me/medusa/main/README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "some/target"
    assert sorted(path.name for path in Path(hub.folder / "me/medusa/main").iterdir()) == sorted(
        ["README.md", "config.json", "model.safetensors", "provenance.json"]
    )
    with pytest.raises(ValueError, match="the hub says: 404: me/nothing"):
        load_head("me/nothing")
