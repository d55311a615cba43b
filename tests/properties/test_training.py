"""Windows, losses and gradients do not depend on how rows are ordered, padded, packed, accumulated or spread out.

Every head with random options, in float64. A batch of rows is compared with its rows one by one, the sum over which is
what any number of processes and of accumulated batches adds up.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from draft_heads.data.collate import DraftCollator
from draft_heads.heads.base import TargetView
from draft_heads.heads.checkpoint import HEADS, head_classes, head_variants
from draft_heads.train.batches import RowBatches, TokenBatches
from tests.heads.small import SIZES, lent_target

TOKENS, HIDDEN = SIZES["vocab_size"], SIZES["hidden_size"]
DECAY = st.sampled_from([1.0, 0.6])
HEAD_OPTIONS = {
    "ctc": st.one_of(
        st.fixed_dictionaries(
            {
                **{"frames": st.integers(5, 6), "labels": st.integers(1, 3), "decay": DECAY},
                **{"label_context": st.sampled_from([0, 2])},
                "labels_cut": st.sampled_from(["agree", "none"]),
                "context": st.sampled_from(["hidden+token", "hidden"]),
            }
        ),
        st.just({"frames": 3, "labels": 2, "frames_from": "chain", "soft_weight": 0.1, "regression_weight": 0.5}),
    ),
    "chimera": st.fixed_dictionaries(
        {
            **{"heads": st.integers(1, 3), "order": st.integers(1, 3), "residual": st.booleans()},
            "projection": st.sampled_from(["full", "shared"]),
            "encoder": st.sampled_from(["kgram", "target_layer0_finetuned"]),
        }
    ),
    "eagle3": st.fixed_dictionaries({"passes": st.integers(1, 3), "decay": DECAY}),
    "hydra": st.fixed_dictionaries(
        {
            **{"heads": st.integers(1, 3), "decay": DECAY, "prefix_attention": st.booleans()},
            "labels_from": st.sampled_from(["tokens", "distribution"]),
        }
    ),
    "medusa": st.fixed_dictionaries({"heads": st.integers(1, 3), "decay": DECAY, "layers": st.integers(0, 2)}),
}
SHARED = st.fixed_dictionaries(
    {
        **{"draft_vocab_size": st.sampled_from([0, 1, 30]), "anchors": st.sampled_from([0, 1, 3])},
        "target_layers": st.sampled_from([[], [1, 2]]),
    }
)


def made(kind, options):
    """A head in float64, all its weights away from zero, which reads more than one layer where it was asked to."""
    head_type, config_type = head_classes(kind)
    torch.manual_seed(3)
    head = head_type(config_type(**SIZES, **options)).double()
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    if head.draft_vocab is not None:
        head.set_draft_vocab(torch.arange(len(head.draft_vocab)) * 2)
    return head


def rows_of(seed, lengths, layers):
    """Rows as datasets hold them, with cached states: text, labels that mostly agree with it, an answer's mask."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(0, 9, (length,), generator=random)  # 0 ends an answer
        other = torch.randint(0, TOKENS, (length,), generator=random)
        greedy = torch.where(torch.rand(length, generator=random) < 0.7, ids, other)
        mask = torch.rand(length, generator=random) < 0.8
        states = {"hidden": torch.randn(length, HIDDEN, generator=random, dtype=torch.float64)}
        if layers:
            states["aux_hidden"] = torch.randn(length, layers * HIDDEN, generator=random, dtype=torch.float64)
        rows.append(
            {"input_ids": ids.tolist(), "greedy_ids": greedy.tolist(), "assistant_mask": mask.tolist()} | states
        )
    return rows


def batch_of(rows, packing=False, padding=0):
    """Rows collated, with their states beside them, and some columns of padding that holds anything."""
    batch = DraftCollator(0, 64, packing)(rows)
    for name in rows[0].keys() & {"hidden", "aux_hidden"} if rows else ():
        width = rows[0][name].shape[-1]
        states = torch.full((*batch["input_ids"].shape, width), 7.0, dtype=torch.float64)
        states[batch["segment_ids"] > 0] = _in_order(rows, batch, name)
        batch[name] = states
    return {name: pad(x, (0, 0, 0, padding) if x.dim() == 3 else (0, padding)) for name, x in batch.items()}


def _in_order(rows, batch, name):
    """States of the rows in the order in which first fit packs them."""
    taken, found = set(), []
    for ids, segments in zip(batch["input_ids"], batch["segment_ids"]):
        for number in range(1, int(segments.max()) + 1):
            text = ids[segments == number].tolist()
            place = next(i for i, row in enumerate(rows) if i not in taken and row["input_ids"] == text)
            taken.add(place)
            found.append(rows[place][name])
    return torch.cat(found)


def measured(head, batches, seed):
    """Summed over batches: loss, windows, gradients by name; in evaluation also hits, counts and parts."""
    lent = lent_target()
    view = TargetView(lent.embedding.double(), lent.lm_head_weight.double())
    head.zero_grad()
    total, windows, rest = 0.0, 0, []
    for batch in batches:
        loss = head(**batch, target=view, seed=seed)
        counted = head.count_windows(**{n: x for n, x in batch.items() if "hidden" not in n}, seed=seed)
        assert int(counted) == int(loss.windows)
        loss.total.backward()
        total, windows = total + float(loss.total.detach()), windows + int(loss.windows)
        if loss.correct is not None:
            rest.append(torch.column_stack([loss.correct, loss.counted, loss.scored]))
    gradients = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
    return total, windows, gradients, sum(rest) if rest else None


def assert_equal(found, expected):
    """Up to rounding in float64."""
    assert found[1] == expected[1]
    assert found[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-9)
    for name in found[2].keys() | expected[2].keys():
        zero = torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(
            *torch.broadcast_tensors(found[2].get(name, zero), expected[2].get(name, zero)), rtol=1e-7, atol=1e-9
        )
    assert (found[3] is None) == (expected[3] is None)
    if found[3] is not None and expected[3] is not None:
        assert torch.equal(found[3], expected[3])


CASE = {
    **{"shared": SHARED, "lengths": st.lists(st.integers(1, 20), min_size=1, max_size=5), "data": st.data()},
    **{"seed": st.integers(0, 99), "training": st.booleans()},
}


def drawn(kind, shared, lengths, data, seed, training):
    variants = [options for _, options in head_variants([kind]).values()]
    options = data.draw(HEAD_OPTIONS.get(kind, st.sampled_from(variants)))
    head = made(kind, shared | options).train(training)
    rows = rows_of(seed, lengths, len(shared["target_layers"]))
    return head, rows, measured(head, [batch_of([row]) for row in rows], seed)


@pytest.mark.parametrize("kind", HEADS)
@given(**CASE)
def test_a_batch_is_the_sum_of_its_rows_in_any_order_with_any_padding(kind, shared, lengths, data, seed, training):
    head, rows, one_by_one = drawn(kind, shared, lengths, data, seed, training)
    order = data.draw(st.permutations(rows))
    padding = data.draw(st.sampled_from([0, 1, 9]))
    assert_equal(measured(head, [batch_of(order, padding=padding)], seed), one_by_one)


@pytest.mark.parametrize("kind", HEADS)
@given(**CASE)
def test_packed_rows_have_the_losses_of_rows_apart(kind, shared, lengths, data, seed, training):
    head, rows, one_by_one = drawn(kind, shared, lengths, data, seed, training)
    assert_equal(measured(head, [batch_of(data.draw(st.permutations(rows)), packing=True)], seed), one_by_one)


@pytest.mark.parametrize("kind", HEADS)
@given(**CASE, processes=st.integers(1, 4), size=st.integers(1, 3))
def test_the_steps_of_an_epoch_on_many_processes_have_every_row_once(
    kind, shared, lengths, data, seed, training, processes, size
):
    head, rows, one_by_one = drawn(kind, shared, lengths, data, seed, training)
    batches = list(RowBatches(len(rows), size, seed, processes))
    assert len(batches) % processes == 0  # every process takes part in every step
    states = [name for name in ("hidden", "aux_hidden") if name in rows[0]]
    empty = {name: torch.zeros(1, 8, rows[0][name].shape[-1], dtype=torch.float64) for name in states}
    collated = [batch_of([rows[i] for i in batch]) | ({} if batch else empty) for batch in batches]
    assert_equal(measured(head, collated, seed), one_by_one)


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    tokens=st.integers(64, 300),
    processes=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_batches_of_tokens_have_every_row_once_within_the_limit(lengths, tokens, processes, epoch):
    batches = TokenBatches(lengths, tokens, 1, processes)
    batches.sampler.set_epoch(epoch)
    rows = list(batches)
    assert sorted(row for batch in rows for row in batch) == list(range(len(lengths)))
    assert len(rows) == len(batches) and len(rows) % processes == 0
    assert all(
        len(batch) * -(-max(lengths[row] for row in batch) // 8) * 8 <= max(tokens, 64) for batch in rows if batch
    )


@given(rows=st.integers(1, 60), size=st.integers(1, 6), processes=st.integers(1, 5), seed=st.integers(0, 9))
def test_a_step_of_many_processes_has_the_rows_of_one(rows, size, processes, seed):
    many, one = list(RowBatches(rows, size, seed, processes)), list(RowBatches(rows, size * processes, seed))
    steps = [many[start : start + processes] for start in range(0, len(many), processes)]
    assert [[row for batch in step for row in batch] for step in steps] == one
