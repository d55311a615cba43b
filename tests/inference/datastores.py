"""Small datastores from token lists, without a tokenizer."""

import json
from types import SimpleNamespace

import torch

from draft_heads.data import datastore, datastore_build
from draft_heads.data.datastore import Datastore
from draft_heads.data.datastore_build import build_datastore


def write_datastore(folder, corpora, vocabulary, monkeypatch):
    """A folder built from token lists: a stand-in tokenizer reads them back out of the message."""
    rows = [
        {"conversations": [{"from": "human", "value": json.dumps(text)}, {"from": "gpt", "value": "."}]}
        for text in corpora
    ]
    source = folder.with_suffix(".json")
    source.write_text(json.dumps(rows))
    for module in (datastore, datastore_build):
        monkeypatch.setattr(module, "tokenizer_hash", lambda tokenizer: tokenizer.hash)
    monkeypatch.setattr(datastore_build, "ChatRenderer", StubRenderer)
    build_datastore(str(source), StubTokenizer(vocabulary), folder)
    return Datastore.open(folder)


class StubTokenizer:
    """Messages hold their token ids as JSON."""

    def __init__(self, vocabulary, name="stub"):
        self.vocabulary, self.hash = vocabulary, name

    def get_vocab(self):
        return {str(token): token for token in range(self.vocabulary)}

    def __call__(self, texts, **options):
        return {"input_ids": [json.loads(text) for text in texts]}


class StubRenderer:
    """A conversation is the text of its first message."""

    def __init__(self, tokenizer):
        pass

    def sound_part(self, messages, skip_bad_rows, extra):
        return messages, None

    def answered(self, messages, extra):
        return messages

    def checked_text(self, messages, extra):
        return messages[0]["content"]

    def check_answers(self, text, messages, extra):
        pass

    def shortened(self, messages, extra):
        return []


def target(tokenizer, vocab_size):
    """What text drafters read of a target."""
    return SimpleNamespace(tokenizer=tokenizer, device=torch.device("cpu"), vocab_size=vocab_size)
