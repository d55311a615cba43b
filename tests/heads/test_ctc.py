"""The CTC head: who sees whom in training, one pass against anchors alone, start values, broken checkpoints."""

import json

import pytest
import torch

from draft_heads.heads.attention import dense_anchor_attention, dense_mask, flex_anchor_attention, frame_mask
from draft_heads.heads.base import Rows
from draft_heads.heads.block import grouped_attention
from draft_heads.heads.checkpoint import load_head
from draft_heads.heads.ctc import CTCConfig, CTCHead
from tests.heads.small import FINGERPRINT, SIZES, disturbed, lent_target


def make_head(**settings):
    return disturbed(CTCHead, CTCConfig, **settings)


@pytest.fixture(scope="module")
def view():
    return lent_target()


def batch(rows=2, length=20, seed=0):
    torch.manual_seed(seed)
    ids = torch.randint(1, 61, (rows, length))
    return {
        "hidden": torch.randn(rows, length, 32),
        "input_ids": ids,
        "segment_ids": torch.ones_like(ids),
        "position_ids": torch.arange(length).expand_as(ids),
    }


def dense_frame_mask(anchors, segments, frames):
    """The whole mask written out."""
    queries = torch.arange(anchors.shape[1] * frames)
    keys = torch.arange(segments.shape[1] + len(queries))
    return dense_mask(frame_mask(anchors, segments, frames), len(anchors), queries, keys)


def frames_of(head, values, anchors, view):
    return head.train_frames(Rows(**values), anchors, view)


def test_the_mask_of_the_worked_example():
    mask = dense_frame_mask(torch.tensor([[1, 2]]), torch.ones(1, 4, dtype=torch.long), 2)[0].long()
    assert mask.tolist() == [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_all_anchors_in_one_pass_equal_each_anchor_alone(view):
    head, values = make_head(), batch()
    anchors = torch.arange(20).expand(2, -1)
    together = frames_of(head, values, anchors, view)
    for anchor in (0, 7, 18):
        upto = {name: value[:, : anchor + 2] for name, value in values.items()}
        alone = frames_of(head, upto, torch.full((2, 1), anchor), view)
        assert torch.allclose(together[:, anchor], alone[:, 0], atol=1e-5)


def test_nothing_leaks_from_the_future_or_from_other_anchors(view):
    head, values = make_head(), batch(rows=1)
    hidden = values["hidden"].clone().requires_grad_()
    frames = frames_of(head, {**values, "hidden": hidden}, torch.tensor([[3, 9, 15]]), view)
    frames[0, 1].sum().backward()
    reached = hidden.grad[0].abs().sum(-1)
    assert (reached[10:] == 0).all() and (reached[:10] > 0).all()


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_both_attention_paths_equal_one_call_with_the_whole_mask(chunk):
    torch.manual_seed(0)
    frames, anchors = 4, torch.tensor([[1, 4, 5, 9, 11], [0, 2, 3, 7, 8]])
    segments = torch.tensor([[1] * 5 + [2] * 7, [1] * 12])
    context = [torch.randn(2, 2, 12, 8) for _ in range(2)]
    queries, keys, values = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    expected = grouped_attention(
        queries,
        torch.cat([context[0], keys], 2),
        torch.cat([context[1], values], 2),
        dense_frame_mask(anchors, segments, frames)[:, None],
    )
    drafting = frame_mask(anchors, segments, frames), anchors, frames, tuple(context)
    dense = dense_anchor_attention(*drafting, anchors_per_chunk=chunk)(queries, keys, values)
    assert torch.allclose(dense, expected, atol=1e-6)
    with torch.no_grad():  # FlexAttention has no backward on CPU
        flex = flex_anchor_attention(*drafting)(queries, keys, values)
    assert torch.allclose(flex, expected, atol=1e-5)


def test_the_frames_of_an_anchor_share_one_row_of_the_mask():
    anchors, segments = torch.tensor([[1, 4, 9], [0, 2, 8]]), torch.tensor([[1] * 5 + [2] * 7, [1] * 12])
    whole, asked = dense_frame_mask(anchors, segments, 4), []
    assert torch.equal(whole, whole[:, ::4].repeat_interleave(4, dim=1))
    visible, left = frame_mask(anchors, segments, 4), (torch.randn(2, 2, 12, 8),) * 2

    def counting(b, head, query, key):
        asked.append(query.unique().tolist())
        return visible(b, head, query, key)

    own = torch.randn(2, 2, 12, 8)
    dense_anchor_attention(counting, anchors, 4, left, anchors_per_chunk=2)(own, own, own)
    assert asked == [[0, 4], [8]]


def test_training_starts_with_frames_that_differ_and_a_blank_of_one_half(view):
    torch.manual_seed(0)
    head = CTCHead(CTCConfig(**SIZES))
    values = batch()
    head.start_from(values["hidden"], view)
    with torch.no_grad():
        frames = frames_of(head, values, torch.tensor([[5, 9], [5, 9]]), view)
        blank = head.frame_logits(frames, view).softmax(-1)[..., -1]
        started = values["hidden"][0, 5] + head.frame_queries
    assert 0.3 < float(blank.mean()) < 0.7
    assert torch.cosine_similarity(frames[0, 0], started, dim=-1).min() > 0.98
    assert torch.cosine_similarity(frames[0, 0, 0], frames[0, 0, 1], dim=0) < 0.9


def test_tokens_are_read_at_the_scale_of_hidden_states(view):
    head, values = CTCHead(CTCConfig(**SIZES)), batch()
    head.start_from(5 * values["hidden"], view)
    every = torch.arange(head.config.vocab_size)
    size = head.token_states(every, view).pow(2).mean().sqrt()
    assert torch.allclose(size, 5 * values["hidden"].pow(2).mean().sqrt(), rtol=1e-3)


def test_the_lent_target_is_no_part_of_the_head(view):
    head = make_head()
    values = batch()
    loss = head(**values, greedy_ids=values["input_ids"], mask=torch.ones(2, 20).bool(), target=view)
    loss.total.backward()
    assert not any(tensor.shape[0] == 61 for tensor in head.state_dict().values() if tensor.dim())
    assert view.lm_head_weight.grad is None
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_evaluation_counts_the_hits_of_every_offset(view):
    head, values = make_head(labels=3), batch()
    loss = head.eval()(**values, greedy_ids=values["input_ids"], mask=torch.ones(2, 20).bool(), target=view)
    assert loss.counted.tolist() == [36, 34, 32] and loss.correct.shape == (3, 5)


@pytest.mark.parametrize(
    "settings,told",
    [
        ({"frames": 6, "labels": 4}, "--frames must be at least 2\\*labels-1 = 7"),
        ({"labels": 0}, "--labels"),
        ({"context": "words"}, "hidden\\+token, hidden"),
        ({"labels_cut": "maybe"}, "agree, none"),
        ({"anchors": -1}, "--anchors"),
        ({"frames_from": "air"}, "queries, chain"),
        ({"frames_from": "chain", "context": "hidden"}, "--frames_from chain needs --context hidden\\+token"),
        ({"soft_weight": 0.1}, "need --frames_from chain"),
        ({"ctc_weight": 0.0}, "not all be 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        CTCConfig(**SIZES, **settings)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "tokenizer_hash", "chat_template_hash"])
def test_a_head_of_another_target_is_refused_with_the_difference_named(tmp_path, field):
    make_head().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=field):
        load_head(tmp_path, {**FINGERPRINT, field: "other"})


def test_broken_checkpoints_say_what_is_wrong(tmp_path):
    make_head().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        load_head(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match="has none"):
        load_head(tmp_path)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "label_context": 2}))
    with pytest.raises(ValueError, match=r"missing class_context"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "kind": "other"}))
    with pytest.raises(ValueError, match="known kinds are chimera, ctc"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged .*copy the checkpoint again"):
        load_head(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        load_head(tmp_path / "nowhere")


CHAIN = {"frames_from": "chain", "frames": 6, "labels": 3}


def test_a_chains_first_frame_and_its_growth_equal_the_training_forward(view):
    """Fed the labels it drafts itself, the teacher-forced chain is the drafted chain."""
    head, values = make_head(**CHAIN), batch(rows=1)
    anchor = 8
    anchors = torch.tensor([[3, anchor]])
    drafted = head.drafted_frames(Rows(**values), anchors, view, anchors_at_once=1)[0, 1]
    assert torch.allclose(drafted, head.drafted_frames(Rows(**values), anchors, view)[0, 1], atol=1e-5)
    ids, hidden = values["input_ids"].clone(), values["hidden"].clone()
    for step in range(5):  # the row as if the target had agreed with the chain
        ids[0, anchor + 2 + step] = view.logits(drafted[step]).argmax()
        hidden[0, anchor + 1 + step] = drafted[step]
    forced = frames_of(head, {**values, "input_ids": ids, "hidden": hidden}, anchors, view)[0, 1]
    assert torch.allclose(drafted, forced, atol=1e-5)


def test_a_chain_needs_text_under_all_its_frames_and_leaks_nothing_beyond(view):
    head, values = make_head(**CHAIN), batch(rows=1)
    ids = values["input_ids"]
    windows = head.windows(ids, ids, torch.ones_like(ids, dtype=torch.bool), values["segment_ids"], 0)
    assert windows.anchors.max() + head.config.frames == ids.shape[1] - 1
    values["hidden"].requires_grad_()
    frames_of(head, values, torch.tensor([[4]]), view).sum().backward()
    assert values["hidden"].grad[0, 10:].abs().max() == 0


def test_the_published_mixture_is_the_sum_of_its_parts(view):
    head, values = make_head(**CHAIN, regression_weight=1.0, soft_weight=0.1, ctc_weight=0.01), batch()
    ids = values["input_ids"]
    loss = head.train()(**values, greedy_ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), target=view)
    ctc, regression, soft = (loss.parts[name] for name in ("ctc", "regression", "soft"))
    assert torch.allclose(loss.total, 0.01 * ctc + regression + 0.1 * soft)

    first = frames_of(head, values, torch.arange(14).expand(2, -1), view)[:, :, 0]
    aims = values["hidden"][:, 1:15]
    expected = -(view.logits(aims).softmax(-1) * view.logits(first).log_softmax(-1)).sum()
    assert torch.allclose(soft, expected, rtol=1e-4)
    apart = (first - aims).abs()
    smooth = torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean(-1).sum()
    assert torch.allclose(regression, smooth, rtol=1e-4)
