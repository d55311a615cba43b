"""The script that makes targets, and the target it made: the committed folder."""

import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from draft_heads.data.common.console import plain_console
from draft_heads.data.labels.loops import loop_start
from draft_heads.data.synthetic.corpus import conversations, questions, word_problems
from draft_heads.data.text.conversations import Conversation
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from draft_heads.inference.answers import answer_prompts
from draft_heads.inference.target.target import Target
from draft_heads.scripts import make_tiny_target
from draft_heads.scripts.make_tiny_target import batches, build_model, load_corpus, make, parse_options, render
from draft_heads.scripts.measure_tiny_target import first_questions, greedy_answers, measure, solved
from tests.tiny_chat import byte_tokenizer, random_llama, render_conversation, render_prompt, template

EMBEDDED = Path(__file__).parents[2] / "data" / "tiny_target"
TINY = ["--max_minutes", "0.03", "--hidden", "32", "--layers", "1", "--questions", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def embedded():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target made with a budget of two seconds: (folder, what the script printed last)."""
    folder = tmp_path_factory.mktemp("made") / "target"
    figures = make(["--output", str(folder), "--conversations", "300", "--vocab_size", "400", *TINY])
    return folder, figures


# ---- the committed target -------------------------------------------------------------------------------


def test_embedded_target_is_deep_and_small(embedded):
    model, tokenizer = embedded
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) <= 8_000_000
    assert model.config.num_hidden_layers >= 12
    assert model.dtype == torch.bfloat16
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_embedded_template_marks_answers_and_their_end(embedded):
    tokenizer = embedded[1]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "12 + 30 = 42"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You are welcome."},
    ]
    ids, mask = render_conversation(tokenizer, messages)
    written = tokenizer.decode([i for i, m in zip(ids, mask) if m])
    assert written == "12 + 30 = 42</s>You are welcome.</s>"
    assert tokenizer.decode(ids) == (
        "<s><|system|>Be brief.<|user|>What is 12 + 30?<|assistant|>12 + 30 = 42</s>"
        "<|user|>Thanks<|assistant|>You are welcome.</s>"
    )
    assert render_prompt(tokenizer, messages[:2]) == ids[: mask.index(True)]


def test_embedded_tokenizer_keeps_digits_apart_and_round_trips(embedded):
    tokenizer = embedded[1]
    assert [tokenizer.decode([i]) for i in tokenizer("87 + 5").input_ids] == ["8", "7", " + ", "5"]
    for text in ("def f(x):\n    return x * 2\n", "naïve Ärger ✓ 漢字", "  two  spaces \n\n- list"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_embedded_target_solves_unseen_problems_and_stops(embedded):
    model, tokenizer = embedded
    share, answers = solved(Target(model, tokenizer), word_problems(24, 123, "heldout", steps=2))
    assert share >= 0.75
    assert all(tokens[-1] == tokenizer.eos_token_id for tokens in answers)


def test_embedded_target_answers_unseen_questions_without_loops(embedded):
    model, tokenizer = embedded
    asked = questions(24, 123, "heldout")
    answers = greedy_answers(
        Target(model, tokenizer), [[{"role": "user", "content": row["turns"][0]}] for row in asked]
    )
    assert all(tokens[-1] == tokenizer.eos_token_id for tokens in answers)
    assert not any(loop_start(tokens) for tokens in answers)
    assert 40 <= sum(map(len, answers)) / len(answers) <= 150


# ---- the script -----------------------------------------------------------------------------------------


def test_made_folder_loads_and_its_card_has_command_and_figures(made):
    folder, figures = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.hidden_size == 32 and len(tokenizer) == 400
    card = (folder / "README.md").read_text()
    assert f"python scripts/make_tiny_target.py --output {folder}" in card and "with a byte-level BPE tokenizer" in card
    assert f"| unseen two-step word problems solved | {figures['solved_2_step']} |" in card
    assert {"ended", "looped", "solved_1_step", "unseen_loss"} <= set(figures)


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--tokenizer t --vocab_size 4096", "--vocab_size has no effect with --tokenizer; got 4096; leave it out"),
        ("--dataset f --conversations 7", "--conversations has no effect with --dataset; got 7; leave it out"),
        ("--split test", "--split has no effect without --dataset; got test; leave it out"),
        ("--skip_bad_rows", "--skip_bad_rows has no effect without --dataset; got True"),
        ("--dataset_config foo", "--dataset_config has no effect without --dataset; got foo"),
    ],
)
def test_a_flag_that_nothing_reads_is_refused(tmp_path, flags, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_options(["--output", str(tmp_path / "out"), *flags.split()])


def test_a_tokenizer_without_a_template_gets_one_and_a_folder_without_a_tokenizer_is_named(made, tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    given = ["--output", str(tmp_path / "out"), "--conversations", "30", *TINY, "--tokenizer"]
    with pytest.raises(ValueError, match=r"--tokenizer .*/empty is no tokenizer's folder or hub id"):
        make([*given, str(tmp_path / "empty")])
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    make([*given, str(tmp_path / "bare")])
    assert "bare has no chat template" in caplog.text
    assert "USER:" in AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert "with the tokenizer that the command names" in (tmp_path / "out" / "README.md").read_text()


def test_dataset_and_tokenizer_make_a_draft_model_for_a_target(made, tmp_path, capsys):
    rows = conversations(60, 5, "train")
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    arguments = ["--dataset", str(tmp_path / "chats.json"), "--tokenizer", str(made[0])]
    figures = make([*arguments, "--output", str(tmp_path / "draft"), *TINY])
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.config.vocab_size == 400
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").get_vocab() == (
        AutoTokenizer.from_pretrained(made[0]).get_vocab()
    )
    assert "solved_2_step" not in figures
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["conversations"] == 58  # every 50th of 60 rows is kept unseen
    assert printed["unseen_loss"] == figures["unseen_loss"]


def test_no_unseen_question_is_trained_on(tmp_path):
    """120 questions, each answered by three models, as published rows of several models' answers have them."""
    ask = lambda text: [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]  # noqa: E731
    rows = [{"messages": ask(f"question {number % 120}")} for number in range(360)]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    given = ["--output", str(tmp_path / "out"), "--dataset", str(tmp_path / "chats.json")]
    trained, unseen = load_corpus(parse_options(given))
    asked = [[row.messages[0]["content"] for _, row in part] for part in (trained, unseen)]
    assert asked[1] == ["question 0", "question 50", "question 100"]  # each once, however many have answered it
    assert len(asked[0]) == 3 * 117 and not {*asked[0]} & {*asked[1]}
    (tmp_path / "chats.json").write_text(json.dumps(rows[::120]))
    with pytest.raises(SystemExit, match=r"2 different first questions or more; .*chats\.json has 1$"):
        load_corpus(parse_options(given))


def test_rows_that_the_chat_template_refuses_stop_or_are_left_out_and_named(embedded, capsys):
    question = {"role": "user", "content": "What is 1 + 1?"}
    sound, typed = [question, {"role": "assistant", "content": "2"}], {"role": "user", "content": "What is </s>?"}
    rows = [("line 1", Conversation(sound, {})), ("line 3", Conversation([typed, sound[1]], {}))]
    rows.append(("line 4", Conversation([*sound, typed, sound[1]], {})))
    options = Namespace(dataset="chats.jsonl", skip_bad_rows=False, max_length=64)
    with pytest.raises(
        ConversationError, match=r"^chats\.jsonl, line 3: a control token in .*'</s>'.* set skip_bad_rows"
    ):
        render(embedded[1], rows, options)
    options.skip_bad_rows = True
    assert render(embedded[1], rows, options) == render(embedded[1], rows[:1] * 2, options)
    told = capsys.readouterr().err
    for outcome, place in (("dropped", "line 3"), ("trimmed", "line 4")):
        assert f"chats.jsonl: 1 row {outcome}: a control token in someone's text ({place})" in told


def test_conversations_without_an_answer_within_the_length_are_counted(embedded, capsys):
    ask = lambda text: Conversation([{"role": "user", "content": text}, {"role": "assistant", "content": "2"}], {})  # noqa: E731
    rows = [("line 1", ask("why " * 200)), ("line 2", ask("Hi"))]
    options = Namespace(dataset="chats.jsonl", skip_bad_rows=False, max_length=64)
    assert len(render(embedded[1], rows, options)) == 1
    assert "chats.jsonl: 1 conversations have no answer within --max_length; left out" in capsys.readouterr().err
    with pytest.raises(ConversationError, match=r"none of 1 conversations, which begin with line 1 .* another order"):
        render(embedded[1], rows[:1], options)


def test_a_tokenizer_whose_ids_have_a_hole_has_a_row_for_each(embedded):
    vocabulary = {"a": 0, "b": 1, "</s>": 7}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>")
    options = Namespace(hidden=64, layers=1, max_length=16, tokenizer="x")
    assert len(tokenizer) == 3 and build_model(tokenizer, options).config.vocab_size == 8


def test_answers_stay_within_the_positions_and_prompts_have_their_arguments():
    tokenizer = byte_tokenizer("{{ 'No tools. ' if not tools else tools | length }}" + template("chatml"))
    target, renderer = Target(random_llama(), tokenizer), ChatRenderer(tokenizer)
    ask = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    near = ask("q" * (251 - len(renderer.prompt(ask("q")))))
    room = 256 - len(renderer.prompt(near))
    assert 0 < room < 20
    answers = greedy_answers(target, [ask("Hi"), ask("q" * 300), near], max_new_tokens=20)
    assert [len(row) > 0 for row in answers] == [True, False, True] and len(answers[2]) <= room
    with_tools = renderer.prompt(ask("Hi"), {"tools": [{}]})
    (expected,) = answer_prompts(target, [with_tools], [20], 1)
    assert greedy_answers(target, [ask("Hi")], 20, [{"tools": [{}]}]) == [expected.tokens]


def test_a_problem_without_room_is_not_solved_and_the_next_keeps_its_answer(embedded):
    target = Target(*embedded)
    easy = next(row for row in word_problems(24, 123, "heldout", steps=1) if solved(target, [row])[0] == 1)
    share, (none, answer) = solved(target, [{"question": "q" * 2 * target.max_positions, "answer": "#### 0"}, easy])
    assert share == 0.5 and none == [] and answer[-1] == embedded[1].eos_token_id


def test_unseen_loss_is_the_mean_over_answer_tokens():
    tokenizer = byte_tokenizer(template("chatml"))
    model = random_llama()
    asked = {"role": "user", "content": "Hi"}
    answered = [[asked, {"role": "assistant", "content": text}] for text in ("a", "b" * 60)]
    unseen = [(f"line {n}", Conversation(messages, {})) for n, messages in enumerate(answered)]
    options = Namespace(dataset="chats.jsonl", skip_bad_rows=False, max_length=128, questions=1)
    rows = render(tokenizer, unseen, options)
    losses = []
    for ids, mask in rows:
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-log_probs[i - 1, ids[i]].item() for i in range(1, len(ids)) if mask[i]]
    assert [sum(mask) for _, mask in rows] == [2, 61]
    found = measure(Target(model, tokenizer), unseen, rows, options)["unseen_loss"]
    assert found == pytest.approx(sum(losses) / 63, abs=1e-3)


def test_first_questions_have_their_rows_arguments_and_no_control_token():
    tokenizer, answer = byte_tokenizer(template("chatml")), {"role": "assistant", "content": "x"}
    texts = ("Hi", "What is </s>?", "Why?", "How?")
    rows = [
        (f"line {n}", Conversation([{"role": "user", "content": text}, answer], {})) for n, text in enumerate(texts)
    ]
    prompts, extras = first_questions(tokenizer, rows, Namespace(questions=2))
    assert [prompt[0]["content"] for prompt in prompts] == ["Hi", "Why?"] and extras == [{}, {}]


def test_batches_are_padded_right_and_keep_to_the_budget():
    rows = [([7] * n, [False] * (n - 1) + [True]) for n in (5, 9, 30, 31, 12, 40)]
    stream = batches(rows, 128, seed=0)
    seen = []
    for ids, mask in (next(stream) for _ in range(3)):
        assert ids.shape == mask.shape and ids.numel() <= 128
        for row, marks in zip(ids, mask):
            length = int((row == 7).sum())
            assert row[:length].eq(7).all() and row[length:].eq(0).all()
            assert marks.nonzero().tolist() == [[length - 1]]
            seen.append(length)
    assert len(seen) >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "40"], "--hidden must be a multiple of 32"),
        (["--max_minutes", "0"], "--max_minutes must be positive"),
        (["--vocab_size", "100"], "--vocab_size must be at least 300"),
    ],
)
def test_wrong_options_name_the_flag(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse_options(["--output", "nowhere", *arguments])
    assert message in capsys.readouterr().err


def test_output_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(ValueError, match="has files; pick another, or empty it"):
        parse_options(["--output", str(tmp_path)])
    with pytest.raises(ValueError, match="is a file; pick another"):
        parse_options(["--output", str(tmp_path / "keep.txt")])


def test_trained_tokens_are_those_of_answers(monkeypatch):
    """Two rows of one batch, the shorter one padded; their 3 + 2 answer tokens are trained in each step."""
    monkeypatch.setattr(make_tiny_target, "time", SimpleNamespace(monotonic=iter(range(1000)).__next__))
    rows = [(list(range(1, 1 + n)), [place >= n - own for place in range(n)]) for n, own in ((6, 3), (4, 2))]
    options = Namespace(learning_rate=1e-3, hidden=32, batch_tokens=1024, seed=0, max_minutes=0.2)
    facts = make_tiny_target.train(random_llama(), [], rows, options, plain_console())
    assert facts["steps"] > 3 and facts["trained_tokens"] == 5 * facts["steps"]
