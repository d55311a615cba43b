"""Questions that are not asked: the template refuses the answer before them, or there is no room."""

import json

import pytest

from draft_heads.data.labels.distill import distill
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.text.conversations import ConversationError
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.target.target import Target
from tests.data.labels.distilling.distilled import rows_of


@pytest.mark.parametrize("users, trained", [(False, True), (False, False), (True, True)])
def test_an_answer_that_the_template_refuses_as_history_ends_its_conversation(
    target, tmp_path, monkeypatch, caplog, users, trained
):
    """As gpt-oss's refuses an answer without a final channel; a question that it refuses is the row's own fault.

    Where the answer before is not to be trained on, nothing of the row is left, for this reason.
    """
    turns = [("user", "one"), ("assistant", "x"), ("user", "bad" if users else "two"), ("assistant", "x")]
    messages = [{"role": role, "content": text} for role, text in turns]
    messages[1]["weight"] = int(trained)
    other = {"id": "b", "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "x"}]}
    source = tmp_path / "chat.json"
    source.write_text(json.dumps([{"id": "a", "messages": messages}, *([] if trained else [other])]))
    render = ChatRenderer.text

    def refusing(self, messages, add_generation_prompt=False, *more, **options):
        said = [turn["content"] for turn in messages]
        if said[0] == "one" and len(said) > 2 and add_generation_prompt and (said[1] != "a" or said[2] == "bad"):
            raise ConversationError("the chat template refuses the conversation")
        return render(self, messages, add_generation_prompt, *more, **options)

    loaded = Target.from_pretrained(target, "float32")
    loaded.model.generation_config.forced_eos_token_id = min(loaded.end_token_ids)  # so that every answer ends
    monkeypatch.setattr(ChatRenderer, "text", refusing)
    options = DistillOptions(labels="generate", max_new_tokens=8)

    def run():
        return distill(loaded, str(source), str(tmp_path / "out"), options, False, False, TargetAnswerer(loaded))

    if users:
        with pytest.raises(ConversationError, match=r"row 1 \(id a\): the chat template refuses .* set skip_bad_rows"):
            run()
        return
    manifest = run()
    counts, skipped = manifest["counts"], [one for shard in manifest["shards"] for one in shard["skipped"]]
    (row,) = rows_of(tmp_path / "out")
    assert sum(row["assistant_mask"]) == 8 and row["greedy_ids"][-1] == min(loaded.end_token_ids)
    assert (counts["rows"], counts["unasked"], counts["skipped"]) == (1, 1, not trained)
    assert [(one["id"], one["reason"]) for one in skipped] == (
        [] if trained else [("a", "the chat template refuses the conversation")]
    )
    assert "row 1 (id a): no question follows an answer of the target: the chat template refuses" in caplog.text


def test_a_first_question_without_room_is_skipped_and_not_counted_as_unasked(target, tmp_path):
    """No answer came before it; the question behind it was not asked either."""
    long, short = "word " * 200, "Hi"
    for name, turns, unasked in (("one", [long], 0), ("two", [long, short], 1)):
        said = [{"role": "user", "content": turn} for turn in turns]
        messages = [one for user in said for one in (user, {"role": "assistant", "content": "A."})]
        rows = [{"messages": messages}, {"messages": [said[-1] | {"content": "Hello"}]}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        loaded = Target.from_pretrained(target, "float32")
        options = DistillOptions(labels="generate", max_new_tokens=8, max_length=64)
        given = str(tmp_path / f"{name}.jsonl"), str(tmp_path / name), options, False, False
        counts = distill(loaded, *given, TargetAnswerer(loaded))["counts"]
        assert (counts["rows"], counts["skipped"], counts["unasked"]) == (1, 1, unasked)


def test_without_room_after_an_answer_that_is_not_trained_on_the_reason_says_so(target, tmp_path):
    """The first answer was written; what lies beyond max_length is the first to train on."""
    said = [{"role": "user", "content": text} for text in ("Hi", "word " * 200)]
    answer = {"role": "assistant", "content": "A."}
    rows = [
        {"messages": [said[0], answer | {"weight": 0}, said[1], answer]},
        {"messages": [said[0] | {"content": "Yo"}]},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = Target.from_pretrained(target, "float32")
    loaded.model.generation_config.forced_eos_token_id = min(loaded.end_token_ids)  # so that every answer ends
    options = DistillOptions(labels="generate", max_new_tokens=8, max_length=64)
    given = str(tmp_path / "chat.jsonl"), str(tmp_path / "out"), options, False, False
    (skipped,) = distill(loaded, *given, TargetAnswerer(loaded))["shards"][0]["skipped"]
    assert skipped["reason"] == "its first answer to train on begins beyond max_length 64"
