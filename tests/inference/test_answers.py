"""Labels and states that come out of writing an answer are those of reading the finished text."""

import pytest
import torch

from draft_heads.data.labels.answers import in_order
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.heads.checkpoint import HEADS
from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.target.target import Target
from tests.inference.models import load_target, make_head, make_prompts
from tests.tiny_chat import byte_tokenizer, random_llama, template

LAYERS = [1, 2]


PROMPTS = [[5 + (7 * i + 3 * j) % 290 for j in range(4 + 5 * i)] for i in range(4)]


def with_tokenizer(**sizes):
    """A target of which a fingerprint can be taken, as heads need that are loaded."""
    return Target(random_llama(**sizes).double(), byte_tokenizer(template("chatml")))


@pytest.mark.parametrize("drafter", ["", "ngram", "lookahead,n=3,w=4"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_labels_and_states_are_those_of_the_whole_text(name, drafter):
    target = load_target(name, torch.float64)
    prompts = [prompt[:length] for prompt, length in zip(make_prompts(target, 6), (7, 1, 30, 12, 2, 19))]
    limits = [20, 1, 9, 20, 20, 3]
    plain = TargetAnswerer(target, 4, keep_hidden=True, target_layers=LAYERS)
    said = [answer.tokens for answer in in_order(plain, prompts, [20] * 6)]
    target.end_token_ids = (said[0][4], said[3][11])
    answerer = TargetAnswerer(target, 4, drafter=drafter, keep_hidden=True, target_layers=LAYERS)
    answers = in_order(answerer, prompts, limits)
    assert {answer.finish for answer in answers} == {"end", "limit"}
    for prompt, limit, tokens, answer in zip(prompts, limits, said, answers):
        end = next((i for i, token in enumerate(tokens, 1) if token in target.end_token_ids), limit)
        assert answer.tokens == tokens[: min(end, limit)]
        (read,) = target.label([prompt + answer.tokens], True, LAYERS)
        assert answer.is_own and answer.tokens == read.greedy_ids[len(prompt) :]
        torch.testing.assert_close(answer.hidden, read.hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(answer.aux_hidden, read.aux_hidden, atol=1e-5, rtol=1e-5)


def test_a_long_text_is_cut_where_it_loops_with_the_states_of_what_is_left():
    target = with_tokenizer(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)  # loops within a few tokens
    target.end_token_ids = (299,)
    answers = in_order(TargetAnswerer(target, 2, cut_loops=True, keep_hidden=True, drafter="ngram"), PROMPTS, [80] * 4)
    assert "loop" in {answer.finish for answer in answers}
    for prompt, answer in zip(PROMPTS, answers):
        (read,) = target.label([prompt + answer.tokens], True)
        torch.testing.assert_close(answer.hidden, read.hidden, atol=1e-5, rtol=1e-5)


def test_what_drafts_labels_must_read_the_layers_that_are_kept(tmp_path):
    target = with_tokenizer(num_hidden_layers=4)
    make_head(target, "eagle3", target_layers=[2]).save_pretrained(tmp_path / "eagle3")
    with pytest.raises(ValueError, match=r"reads layers \[2\] and the states of layers \[1\] are to be kept; .*ngram"):
        TargetAnswerer(target, 2, drafter=f"eagle3={tmp_path}/eagle3", keep_hidden=True, target_layers=[1])


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_answers_whose_states_are_kept(kind, tmp_path):
    """Also of layers that it does not read itself."""
    target = with_tokenizer(num_hidden_layers=4)
    layers = LAYERS if kind == "eagle3" else []
    make_head(target, kind, scale=0.3, target_layers=layers).save_pretrained(tmp_path / kind)
    written = [
        in_order(TargetAnswerer(target, 2, drafter=drafter, keep_hidden=True, target_layers=LAYERS), PROMPTS, [12] * 4)
        for drafter in ("", f"{kind}={tmp_path}/{kind}")
    ]
    for plain, drafted in zip(*written):
        assert plain.tokens == drafted.tokens
        torch.testing.assert_close(plain.aux_hidden, drafted.aux_hidden, atol=1e-5, rtol=1e-5)


def test_a_drafter_is_for_answers_that_are_written_here():
    with pytest.raises(ValueError, match="--drafter drafts the answers that the target writes here; got 'ngram' with"):
        DistillOptions(drafter="ngram")
    assert DistillOptions(drafter="ngram", labels="generate").drafter == "ngram"
