"""From a conversation file to labelled shards: what the rows hold, what is counted and refused."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_heads.data.labels.distill import distill
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.distiller import Distiller
from draft_heads.data.labels.manifest import differences
from draft_heads.data.labels.shards import load_distilled
from draft_heads.data.text.conversations import ConversationError
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.target.target import Target
from tests.data.labels.distilling.distilled import rows_of, run_distill
from tests.tiny_chat import (
    byte_tokenizer,
    load_conversations,
    render_conversation,
    render_prompt,
    save_target,
    template,
    trained_runs,
)


def greedy_ids(model, row):
    chosen = [-100] + model(torch.tensor([row["input_ids"]])).logits[0, :-1].argmax(-1).tolist()
    return [token if trained else -100 for token, trained in zip(chosen, row["assistant_mask"])]


def test_argmax_keeps_the_text_and_adds_the_targets_choices(target, source, tmp_path):
    manifest = run_distill(target, source, str(tmp_path / "out"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    rows = rows_of(tmp_path / "out")
    assert [row["id"] for row in rows] == [f"c{i}" for i in range(10)]
    agreeing = 0
    for row, conversation in zip(rows, load_conversations(source)):
        assert (row["input_ids"], row["assistant_mask"]) == render_conversation(tokenizer, conversation["messages"])
        assert row["greedy_ids"] == greedy_ids(model, row)
        agreeing += sum(
            m and x == y for m, x, y in zip(*(row[k] for k in ("assistant_mask", "input_ids", "greedy_ids")))
        )
    counts = manifest["counts"]
    trained = sum(sum(row["assistant_mask"]) for row in rows)
    assert (counts["rows"], counts["trained_tokens"]) == (10, trained)
    assert counts["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert counts["agreement"] == pytest.approx(agreeing / trained, abs=1e-6)
    assert [shard["rows"] for shard in manifest["shards"]] == [4, 4, 2]
    assert manifest["complete"] and manifest["end_token_ids"] == [2, 4, 138]


@pytest.mark.parametrize("thinks", [False, True])
def test_many_answers_that_do_not_end_are_told_with_what_helps(source, tmp_path, caplog, thinks):
    target = save_target(tmp_path / "target")
    own = tmp_path / "own.jinja"
    own.write_text(("{% if enable_thinking %}{% endif %}" if thinks else "") + template("chatml"))
    options = {"labels": "generate", "max_new_tokens": 1, "chat_template": str(own)}
    counts = run_distill(target, source, str(tmp_path / "out"), **options)["counts"]
    assert counts["unfinished"] * 5 > counts["rows"]
    conversations = load_conversations(source)
    questions = sum(turn["role"] == "user" for one in conversations for turn in one["messages"])
    masks = [row["assistant_mask"] for row in rows_of(tmp_path / "out")]
    answers = sum(mask[0] + sum(own > before for before, own in pairwise(mask)) for mask in masks)
    assert counts["unasked"] == questions - answers > 0 and counts["skipped"] == 0
    assert f"{counts['unasked']} questions were not asked: the answer before them ended at" in caplog.text
    told = f"{counts['unfinished']} of {counts['rows']} rows end before their answer does, at --max_new_tokens 1: raise"
    assert told in caplog.text and ("enable_thinking" in caplog.text) == thinks


def test_recorded_answers_that_the_template_shortens_are_counted(target, tmp_path, caplog):
    answer = "(m['content'] if loop.last else m['content'].split('</think>')[-1])"
    (tmp_path / "own.jinja").write_text(template("chatml").replace("m['content'] | trim", answer))
    texts = ("One?", "<think>Hm.</think>1", "Two?", "<think>Hm again.</think>2")
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    options = {"chat_template": str(tmp_path / "own.jinja")}
    manifest = run_distill(target, str(tmp_path / "a.jsonl"), str(tmp_path / "out"), **options)
    assert manifest["counts"]["shortened"] == 1 and "1 answers to earlier questions are trained on" in caplog.text


def test_the_manifest_says_how_the_target_was_loaded(target, source, tmp_path):
    loaded = Target.from_pretrained(target, "float64")
    loaded.adapter = "adapters/style"
    manifest = distill(loaded, source, str(tmp_path / "out"), DistillOptions(limit=1), show_progress=False)
    assert manifest["target"] == {"path": target, "chat_template": None, "fingerprint": loaded.fingerprint()}
    assert (manifest["settings"]["dtype"], manifest["settings"]["target_adapter"]) == ("float64", "adapters/style")


def test_a_target_without_end_tokens_is_refused(target, source, tmp_path):
    loaded = Target.from_pretrained(target)
    loaded.end_token_ids = ()
    with pytest.raises(ValueError, match="names an end-of-turn token; set eos_token"):
        distill(loaded, source, str(tmp_path / "out"), DistillOptions(), show_progress=False)


def test_options_of_python_that_are_no_json_are_the_same_distillation(target, source, tmp_path):
    options = DistillOptions(labels="argmax", hidden_states="float32", target_layers=(1,), limit=3)
    loaded = Target.from_pretrained(target)
    assert distill(loaded, source, str(tmp_path / "out"), options, show_progress=False)["complete"]


def test_a_target_spread_over_the_devices_gives_the_same_rows(target, source, tmp_path):
    options = DistillOptions(labels="generate", max_new_tokens=8, limit=3)
    for device in ("cpu", "auto"):
        loaded = Target.from_pretrained(target, "float64", device)
        distill(loaded, source, str(tmp_path / device), options, False, False, TargetAnswerer(loaded))
    assert rows_of(tmp_path / "auto") == rows_of(tmp_path / "cpu")


def test_generate_answers_every_turn_and_keeps_the_targets_own_tokens(target, source, tmp_path):
    manifest = run_distill(target, source, str(tmp_path / "out"), labels="generate", max_new_tokens=20)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    assert tokenizer.convert_ids_to_tokens(4) == "<|im_end|>"  # closes a turn; 2 and 138 end answers otherwise
    ends, renderer, turns, expected = {2, 4, 138}, ChatRenderer(tokenizer), [], []
    for conversation in load_conversations(source):
        messages = conversation["messages"]
        ids, mask = render_prompt(tokenizer, messages[:1]), []
        mask = [False] * len(ids)
        turns.append(0)
        for turn in (1, 3):
            if turn == 3 and ids[-1] == 4:
                tail = renderer.next_turn(messages[:3])
                ids, mask = ids + tail, mask + [False] * len(tail)
            elif turn == 3:  # a row of its own, with the prompt that the target gets in use
                expected.append((conversation["id"], ids, mask))
                answer = tokenizer.decode([token for token, own in zip(ids, mask) if own][:-1])
                ids = render_prompt(tokenizer, [messages[0], {"role": "assistant", "content": answer}, messages[2]])
                mask = [False] * len(ids)
            turns[-1] += 1
            for _ in range(20):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                mask.append(True)
                if ids[-1] in ends:
                    break
            if ids[-1] not in ends:
                break
        expected.append((conversation["id"], ids, mask))
    rows = rows_of(tmp_path / "out")
    assert [(row["id"], row["input_ids"], row["assistant_mask"]) for row in rows] == expected
    assert all(
        x == y for row in rows for m, x, y in zip(row["assistant_mask"], row["input_ids"], row["greedy_ids"]) if m
    )
    assert set(turns) == {1, 2}  # some conversations ended at max_new_tokens, some went on
    assert len(rows) > len(turns)  # in some another token than the template's ended the first answer
    assert manifest["counts"]["agreement"] == 1.0
    assert 0 < manifest["counts"]["unfinished"] < len(rows)
    assert manifest["counts"]["cut"] == 0


def test_answers_and_labels_follow_the_checkpoints_own_penalty(target, source, tmp_path):
    own = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "temperature": 0.5, "eos_token_id": [2, 138]}
    penalised = shutil.copytree(target, tmp_path / "penalised")
    (penalised / "generation_config.json").write_text(json.dumps(own))
    options = dict(labels="generate", max_new_tokens=20)
    plain = run_distill(target, source, str(tmp_path / "plain"), **options)
    manifest = run_distill(str(penalised), source, str(tmp_path / "out"), **options)
    model, changed = AutoModelForCausalLM.from_pretrained(penalised), 0
    for row, other in zip(rows_of(tmp_path / "out"), rows_of(tmp_path / "plain")):
        start = row["assistant_mask"].index(True)
        end = (row["assistant_mask"] + [False]).index(False, start)
        ids = torch.tensor([row["input_ids"][:start]])
        ends = {"eos_token_id": [2, 4, 138], "pad_token_id": 0}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, **ends)
        assert row["input_ids"][start:end] == found[0, start:].tolist()
        changed += row["input_ids"] != other["input_ids"]
    assert changed and manifest["counts"]["agreement"] == 1.0  # the labels are those of the same penalty
    asked = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    assert manifest["settings"]["own_generation_settings"] == asked
    assert "own_generation_settings" not in plain["settings"]


def test_questions_asked_before_are_answered_once_and_counted(target, source, tmp_path):
    conversations = json.loads(Path(source).read_text())
    again = json.loads(json.dumps(conversations[:3]))
    for row in again:
        row["id"] = f"again {row['id']}"
        row["conversations"][1]["value"] = "Another model said this, at some length, and so on."
    twice = tmp_path / "twice.json"
    twice.write_text(json.dumps(conversations + again))
    manifest = run_distill(target, str(twice), str(tmp_path / "out"), labels="generate", max_new_tokens=4)
    assert list(dict.fromkeys(row["id"] for row in rows_of(tmp_path / "out"))) == [f"c{i}" for i in range(10)]
    assert manifest["data"]["repeated"] == 3 and manifest["data"]["rows"] == 10
    recorded = run_distill(target, str(twice), str(tmp_path / "argmax"))
    assert recorded["counts"]["rows"] == 13 and recorded["data"]["repeated"] == 0


def test_long_rows_are_cut_or_skipped_and_listed(target, source, tmp_path):
    whole = run_distill(target, source, str(tmp_path / "whole"))
    lengths = [len(row["input_ids"]) for row in rows_of(tmp_path / "whole")]
    limit = sorted(lengths)[5]
    manifest = run_distill(target, source, str(tmp_path / "cut"), max_length=limit)
    rows = rows_of(tmp_path / "cut")
    assert [len(row["input_ids"]) for row in rows] == [min(length, limit) for length in lengths]
    assert manifest["counts"]["cut"] == sum(length > limit for length in lengths) > 0
    assert [i for shard in manifest["shards"] for i in shard["cut"]] == [
        f"c{i}" for i, length in enumerate(lengths) if length > limit
    ]
    assert whole["counts"]["cut"] == 0

    prompts = [
        len(render_prompt(AutoTokenizer.from_pretrained(target), c["messages"][:1])) for c in load_conversations(source)
    ]
    limit = sorted(prompts)[5]
    for labels in ("argmax", "generate"):
        manifest = run_distill(target, source, str(tmp_path / labels), labels=labels, max_length=limit)
        skipped = [row for shard in manifest["shards"] for row in shard["skipped"]]
        too_long = [i for i, length in enumerate(prompts) if length >= limit]
        assert [row["row"] for row in skipped] == too_long
        assert {row["id"] for row in rows_of(tmp_path / labels)} == {f"c{i}" for i in range(10) if i not in too_long}
        assert "begins beyond max_length" in skipped[0]["reason"]
        assert all(len(row["input_ids"]) <= limit for row in rows_of(tmp_path / labels))


def test_second_turn_without_room_ends_the_conversation_as_cut(target, tmp_path):
    long = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}, {"from": "human", "value": "word " * 60}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"id": "long", "conversations": long}))
    target = save_target(
        tmp_path / "talker", extra_end=None, hidden_size=8, num_attention_heads=2, num_key_value_heads=1
    )
    model = AutoModelForCausalLM.from_pretrained(target)
    ids = render_prompt(AutoTokenizer.from_pretrained(target), [{"role": "user", "content": "Hi"}])
    first = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    target = save_target(
        tmp_path / "brief", extra_end=first, hidden_size=8, num_attention_heads=2, num_key_value_heads=1
    )
    chat, out = str(tmp_path / "chat.jsonl"), str(tmp_path / "out")
    manifest = run_distill(target, chat, out, labels="generate", max_length=64)
    assert rows_of(tmp_path / "out")[0]["input_ids"] == ids + [first]
    assert manifest["shards"][0]["cut"] == ["long"]


def test_loops_are_cut_and_counted(tmp_path, source):
    target = save_target(tmp_path / "target", hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    options = {"labels": "generate", "max_new_tokens": 80}
    whole = run_distill(target, source, str(tmp_path / "whole"), cut_loops=False, **options)
    cut = run_distill(target, source, str(tmp_path / "cut"), **options)
    assert whole["counts"]["loops"] == 0 < cut["counts"]["loops"]
    assert cut["counts"]["trained_tokens"] < whole["counts"]["trained_tokens"]


def test_row_the_template_cannot_render_stops_or_is_listed(tmp_path, target):
    refusing = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('refused') }}{% endif %}" + template("vicuna")
    (tmp_path / "t.jinja").write_text(refusing)
    rows = [
        {"id": i, "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}
        for i, text in enumerate(["yes", "no"])
    ]
    source = tmp_path / "chat.json"
    source.write_text(json.dumps(rows))
    options = {"chat_template": str(tmp_path / "t.jinja")}
    with pytest.raises(ConversationError, match=r"row 2 \(id 1\).*refused.*set skip_bad_rows"):
        run_distill(target, str(source), str(tmp_path / "out"), **options)
    manifest = run_distill(target, str(source), str(tmp_path / "out"), skip_bad_rows=True, **options)
    assert [row["id"] for row in manifest["shards"][0]["skipped"]] == ["1"]
    assert manifest["counts"]["skipped"] == 1


def test_a_longest_answer_that_rows_have_no_room_for_is_told_before_anything_is_asked(target, source, caplog):
    loaded = Target.from_pretrained(target)
    for longest, told in ((64, True), (63, False)):
        caplog.clear()
        Distiller(loaded, DistillOptions(labels="generate", max_new_tokens=longest, max_length=64))
        assert ("no answer reaches max_new_tokens 64: raise max_length" in caplog.text) == told


def test_hidden_states_are_what_the_lm_head_reads(target, source, tmp_path, capsys):
    run_distill(target, source, str(tmp_path / "out"), hidden_states="target")
    assert capsys.readouterr().out.startswith("H=32 float32: 0.125 KiB per token, ")
    loaded = load_distilled(str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.hidden_dtype == "float32"
    assert sorted(loaded.dataset["id"]) == sorted(f"c{i}" for i in range(10))
    for row in loaded.dataset:
        hidden = torch.frombuffer(bytearray(row["hidden"]), dtype=torch.float32).view(-1, 32)
        chosen = [-100] + model.lm_head(hidden[:-1]).argmax(-1).tolist()
        trained = [token if yes else -100 for token, yes in zip(chosen, row["assistant_mask"])]
        assert row["greedy_ids"] == trained and max(trained) > 0


def test_finished_output_and_other_settings_name_overwrite(target, source, tmp_path):
    out = str(tmp_path / "out")
    run_distill(target, source, out, limit=4)
    with pytest.raises(ValueError, match="already complete; set overwrite"):
        run_distill(target, source, out, limit=4)
    with pytest.raises(
        ValueError, match=r"data.rows is 4 there, 3 here; .*settings.limit is 4 there, 3 here; set overwrite"
    ):
        run_distill(target, source, out, limit=3)
    with pytest.raises(ValueError, match=r"target\.fingerprint\.chat_template_hash is '\w+' there"):
        other = save_target(tmp_path / "other", style="vicuna", extra_end=138)
        run_distill(other, source, out, limit=4)
    run_distill(target, source, out, overwrite=True, limit=3)
    assert len(rows_of(out)) == 3


def test_a_run_goes_on_with_the_same_constants_only_and_older_ones_are_not_compared():
    def header(**constants):
        return {"target": {"path": "t", "fingerprint": {"weights_hash": "w", **constants}}, "settings": {"limit": 4}}

    windowless, windowed = (header(constants={"sliding_window": size, "rope": {"a": 1}}) for size in (None, 8))
    told = ["target.fingerprint.constants.sliding_window is None there, 8 here"]
    assert differences(windowless, windowed) == told and differences(windowed, windowed) == []
    assert differences(header(), windowed) == []
    lost = {"target": {"path": "t", "fingerprint": {"constants": {}}}, "settings": {"limit": 4}}
    assert differences(header(), lost) == ["target.fingerprint.weights_hash is 'w' there, None here"]
    other = {**windowed, "settings": {"limit": 5}}
    assert differences(windowless, other) == ["settings.limit is 4 there, 5 here", *told]


def test_of_bad_rows_their_places_are_compared_and_of_long_lists_the_beginning_is_told():
    def header(*bad):
        return {"target": {"path": "t", "fingerprint": {}}, "data": {"bad_rows": bad}}

    bad = [{"place": f"line {number}", "reason": "no answer", "kept_turns": 0} for number in range(999)]
    assert differences(header(*bad), header(*({**row, "reason": "it has no answer"} for row in bad))) == []
    (told,) = differences(header(*bad), header(*bad[1:]))
    assert told.startswith("data.bad_rows is [('line 0', 0), ('line 1', 0), ") and len(told) < 600
    (told,) = differences(header(bad[0]), header({**bad[0], "kept_turns": 2}))
    assert told == "data.bad_rows is [('line 0', 0)] there, [('line 0', 2)] here"


def test_folder_with_other_files_is_left_alone(target, source, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\)"):
            run_distill(target, source, str(tmp_path), overwrite=overwrite)


def test_unfinished_missing_or_truncated_output_does_not_load(target, source, tmp_path):
    with pytest.raises(ValueError, match=r"has no manifest.json; pass the output folder"):
        load_distilled(str(tmp_path))
    out = tmp_path / "out"
    run_distill(target, source, str(out))
    shard = out / "shard-00001.arrow"
    whole = shard.read_bytes()
    for damaged, wrong in ((whole[:-100], r"has \d+ bytes instead of \d+"), (b"X" * len(whole), "checksum differs")):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"shard-00001.arrow .*{wrong}.*; the same scripts/distill.py command"):
            load_distilled(str(out))
        run_distill(target, source, str(out))
        assert shard.read_bytes() == whole and json.loads((out / "manifest.json").read_text())["complete"]
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    with pytest.raises(ValueError, match="is not complete"):
        load_distilled(str(out))
    (out / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_distilled(str(out))


@pytest.mark.parametrize("labels", ["argmax", "generate"])
def test_an_output_without_a_row_is_an_error_that_says_why(target, source, tmp_path, labels):
    reason = r"all 10 are left out, .* begins beyond max_length 4; take other rows, or settings that do"
    with pytest.raises(ValueError, match=reason):
        run_distill(target, source, str(tmp_path / "out"), labels=labels, max_length=4)


def test_max_length_beyond_the_targets_positions_is_refused(target, source, tmp_path):
    with pytest.raises(ValueError, match=r"^max_length 300 exceeds the target's 256 positions; lower it"):
        run_distill(target, source, str(tmp_path / "out"), max_length=300)


def test_vicuna_style_target_trains_on_its_answers_alone(tmp_path, source):
    target = save_target(tmp_path / "target", style="vicuna")
    run_distill(target, source, str(tmp_path / "out"), limit=1)
    row = rows_of(tmp_path / "out")[0]
    runs = trained_runs(byte_tokenizer(template("vicuna")), row["input_ids"], row["assistant_mask"])
    assert [run[:12] for run in runs] == [" Turn 1 of 0", " Turn 3 of 0"]
    assert all(run.endswith("</s>") for run in runs)
