"""What holds for every registered head and its variants, from the loss to the export, the decoder and its cost."""

from dataclasses import replace

import pytest
import torch

from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.checkpoint import HEADS, head_classes, head_variants, load_head
from draft_heads.heads.draft_vocab import OUTSIDE
from draft_heads.heads.export.formats import differences, formats_of, read_folder, write_folder
from draft_heads.heads.target_view import LogitsRule
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.tree import padded_nodes
from tests.heads.small import FINGERPRINT, SIZES, disturbed, lent_target, loss_of, text
from tests.heads.test_export import TARGET
from tests.heads.test_training_at_scale import step
from tests.heads.trained import RULES, simulated, texts, trained
from tests.inference.test_ahead import HostQuestions
from tests.inference.test_engine import decode_with_partial_acceptances
from tests.inference.test_rehearsal import make_drafter, make_engine, rehearse, rehearse_batch
from tests.running import run_script
from tests.train.conftest import dataset, distil  # noqa: F401  fixtures
from tests.train.runs import command, losses

GIB = 2**30
VARIANTS = head_variants()
every_kind = pytest.mark.parametrize("kind", HEADS)


def make(name, **settings):
    """A head of a variant, all its parts away from zero."""
    kind, options = VARIANTS[name]
    return disturbed(*head_classes(kind), **{**options, **settings})


@pytest.fixture(params=VARIANTS)
def name(request):
    return request.param


@pytest.fixture
def head(name):
    return make(name)


@pytest.fixture(scope="module")
def view():
    return lent_target()


def steps(head, view, first, last, optimizer=None):
    """Train from one step to another; returns the losses and the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(head.parameters(), lr=3e-3)
    head.train()
    found = []
    for number in range(first, last):
        loss = loss_of(head, text(rows=3, length=26, seed=number % 2), view, seed=number)
        (loss.total / loss.windows).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.total.detach() / loss.windows))
    return found, optimizer


# ----------------------------------------------------------------------------------------------------
# What it declares


@every_kind
def test_it_is_declared_once_and_whole(kind):
    head_type, config = head_classes(kind)
    assert config.kind == kind and config.title and config.budget.training > 0
    assert HEAD_DRAFTERS[kind].kind == kind
    head = head_type(config(**SIZES))
    assert head.weights_read() > 0 and head.config.offsets >= 1


# ----------------------------------------------------------------------------------------------------
# Training


def test_the_loss_falls(head, view):
    found, _ = steps(head, view, 0, 16)
    assert sum(found[-2:]) < 0.95 * sum(found[:2])


def test_training_goes_on_where_it_stopped(name, view, tmp_path):
    """All that a head learns is in its checkpoint, and its anchors depend on the step's seed alone."""
    whole, stopped = make(name, anchors=4), make(name, anchors=4)
    expected, _ = steps(whole, view, 0, 4)
    before, optimizer = steps(stopped, view, 0, 2)
    stopped.save_pretrained(tmp_path)
    resumed = load_head(tmp_path, FINGERPRINT)
    fresh = torch.optim.AdamW(resumed.parameters(), lr=3e-3)
    fresh.load_state_dict(optimizer.state_dict())
    after, _ = steps(resumed, view, 2, 4, fresh)
    assert before + after == expected
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(whole.parameters(), resumed.parameters()))


@pytest.mark.slow
@every_kind
def test_a_run_that_was_cut_short_ends_as_one_that_was_not(kind, dataset, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    words = command(dataset, run, "--save_total_limit", "5", kind=kind)
    first = run_script(*words)
    expected = losses(run)
    for lost in ("checkpoint-4", "checkpoint-6", "head"):
        (run / lost).rename(tmp_path / lost)
    status, told = run_script(*words)
    assert (first[0], status) == (0, 0), told
    assert "resuming" in told and losses(run) == pytest.approx(expected, abs=1e-6)


def test_a_saved_head_comes_back_equal(head, view, tmp_path):
    head.eval()
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, FINGERPRINT).eval()
    assert type(loaded) is type(head) and loaded.config == head.config
    assert torch.equal(loss_of(loaded, text(rows=2), view).total, loss_of(head, text(rows=2), view).total)


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind in HEADS for form in formats_of(kind)])
@pytest.mark.parametrize("size", [0, 40])
def test_it_comes_back_from_every_format_that_holds_it(kind, form, size, tmp_path):
    head = make(kind, target_layers=head_classes(kind)[1].usual_layers(9), draft_vocab_size=size).eval()
    write_folder(head, form, tmp_path / "out", TARGET, "t")
    back = read_folder(tmp_path / "out")
    assert back.config.kind == kind and differences(head, back, form) == []


def test_what_it_reads_of_the_lm_head_has_its_scale_bias_and_type(head, view):
    """As in `TargetView.head_logits`, from which it drafts; fewer bits than its own: --target_dtype bfloat16."""
    changed = {"lm_head_weight": -view.lm_head_weight}, {"lm_head_bias": torch.randn(61)}, {"rule": LogitsRule(4.0)}
    rough = TargetView(lent_target().embedding.bfloat16(), view.lm_head_weight.bfloat16())
    views = view, rough, *(replace(view, **one) for one in changed)
    plain, short, *found = (head.eval().offset_log_probs(text(), torch.tensor([[3, 5]]), each) for each in views)
    assert len({torch.allclose(one, plain, atol=0.02) for one in found}) == 1  # none of them, or all
    assert torch.allclose(short, plain, atol=0.3) and loss_of(head, text(), rough).total.isfinite()


def test_windows_are_counted_as_the_forward_uses_them(head, view):
    head.config.anchors = 4
    head.train()
    rows = text(rows=2)
    mask = torch.rand(2, 20) < 0.7
    used = int(loss_of(head, rows, view, mask, seed=5).windows)
    counted = head.count_windows(rows.input_ids, rows.input_ids, mask, segment_ids=rows.segment_ids, seed=5)
    assert used == int(counted) > 0


def test_a_batch_without_a_window_has_no_loss_and_zero_gradients(head, view):
    loss = loss_of(head, text(rows=2), view, torch.zeros(2, 20, dtype=torch.bool))
    loss.total.backward()
    assert int(loss.windows) == 0 and loss.total.item() == 0
    assert all(float(p.grad.abs().max()) == 0 for p in head.parameters() if p.requires_grad)


def test_gradients_are_ready_in_one_order_with_and_without_windows(head, view):
    """ZeRO-2 puts them into its buckets in that order, which must be the same on all processes."""
    orders = []
    for mask in (torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 20, dtype=torch.bool)):
        order: list[str] = []
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _, name=name, order=order: order.append(name))
            for name, p in head.named_parameters()
            if p.requires_grad
        ]
        loss_of(head, text(rows=2), view, mask).total.backward()
        orders.append(order)
        for hook in hooks:
            hook.remove()
    assert orders[0] == orders[1] and len(orders[0]) == len(hooks)


def test_evaluation_counts_the_five_best_of_every_offset(head, view):
    loss = loss_of(head.eval(), text(rows=2), view)
    offsets = head.config.offsets
    assert loss.correct.shape == (offsets, 5) and loss.counted.shape == (offsets,)
    assert (loss.correct.diff(dim=1) >= 0).all() and (loss.correct[:, -1] <= loss.counted).all()


def test_accuracies_are_those_of_the_log_probabilities_by_offset(head, view):
    """`offset_log_probs` and the loss read the same numbers."""
    rows = text(rows=1)
    loss = loss_of(head.eval(), rows, view)
    hits = torch.zeros(head.config.offsets)
    windows = head.windows(rows.input_ids, rows.input_ids, torch.ones(1, 20, dtype=torch.bool), rows.segment_ids)
    found = head.offset_log_probs(rows, windows.anchors, head.draft_view(view))
    for window, labels, length in zip(found, windows.labels[0], windows.lengths[0].tolist()):
        hits[:length] += (window[:length].argmax(-1) == labels[:length]).float()
    assert torch.equal(hits, loss.correct[:, 0])


def test_more_offsets_than_the_text_is_long_still_train(head, view):
    loss = loss_of(head, text(rows=1, length=2 + head.tokens_after()), view)
    if int(loss.windows):
        loss.total.backward()
    assert torch.isfinite(loss.total)


# ----------------------------------------------------------------------------------------------------
# What it must not see


def test_drafts_at_an_anchor_do_not_see_what_follows_it(head, view):
    """Of hidden states those up to the anchor, of tokens those before each offset.

    Beside a later anchor, for which attention reads more of the row than this one may see.
    """
    rows, anchor, later = text(rows=1), 4, 9
    anchors = torch.tensor([[anchor, later]])
    rows.hidden.requires_grad_()
    head.eval()
    found = head.offset_log_probs(rows, anchors, view)[0]
    (found * torch.randn(found.shape)).sum().backward()
    assert rows.hidden.grad[0, : anchor + 1].abs().sum() > 0
    assert rows.hidden.grad[0, anchor + 1 :].abs().max() == 0
    for offset in range(head.config.offsets):
        ids = rows.input_ids.clone()
        ids[0, anchor + 2 + offset :] = 7  # the label at this offset and all behind it
        changed = Rows(rows.hidden, ids, rows.segment_ids, rows.position_ids)
        other = head.offset_log_probs(changed, anchors, view)[0]
        assert torch.equal(other[: offset + 1], found[: offset + 1])


def test_the_loss_does_not_see_text_after_its_labels(head, view):
    rows, anchor = text(rows=1, length=40), 4
    mask = torch.zeros(1, 40, dtype=torch.bool)
    end = anchor + 2 + head.config.offsets
    mask[:, anchor + 1 : end] = True
    reach = end + head.tokens_after()
    changed = text(rows=1, length=40, seed=1)
    ids, hidden = rows.input_ids.clone(), rows.hidden.clone()
    ids[:, reach:], hidden[:, reach:] = changed.input_ids[:, reach:], changed.hidden[:, reach:]
    head.eval()
    one, two = (loss_of(head, each, view, mask) for each in (rows, Rows.of(hidden, ids)))
    assert int(one.windows) > 0 and torch.equal(one.total, two.total)


def test_packed_conversations_do_not_see_each_other(head, view):
    head.eval()
    apart = text(rows=2, length=14)
    packed = Rows(
        apart.hidden.reshape(1, 28, 32),
        apart.input_ids.reshape(1, 28),
        torch.tensor([[1] * 14 + [2] * 14]),
        torch.arange(14).repeat(2)[None],
    )
    one, two = loss_of(head, packed, view), loss_of(head, apart, view)
    assert int(one.windows) == int(two.windows) > 0
    assert torch.allclose(one.total, two.total, rtol=1e-4)


def test_padding_changes_nothing(head, view):
    head.eval()
    rows, pad = text(rows=1, length=14), torch.nn.functional.pad
    longer = (pad(each, (0, 5)) for each in (rows.input_ids, rows.segment_ids, rows.position_ids))
    padded = Rows(pad(rows.hidden, (0, 0, 0, 5), value=3.0), *longer)
    mask = padded.segment_ids > 0
    one, two = loss_of(head, rows, view), loss_of(head, padded, view, mask)
    assert int(one.windows) == int(two.windows) and torch.allclose(one.total, two.total, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------
# The draft vocabulary

ODD = torch.tensor([0, *range(1, 60, 2)])  # 31 of 61 tokens, the end token among them


def cut(name, ids):
    """A variant that drafts from `ids`."""
    head = make(name, draft_vocab_size=len(ids))
    head.set_draft_vocab(ids)
    return head


def test_a_draft_vocabulary_of_all_tokens_changes_nothing(name, view):
    rows, one, other = text(rows=2), cut(name, torch.arange(61)), make(name)
    for training in (False, True):
        torch.manual_seed(0)
        mine = loss_of(one.train(training), rows, view)
        torch.manual_seed(0)
        theirs = loss_of(other.train(training), rows, view)
        assert torch.equal(mine.total, theirs.total) and mine.parts.keys() == theirs.parts.keys()
        assert training or (torch.equal(mine.correct, theirs.correct) and torch.equal(mine.counted, theirs.counted))


def test_labels_that_cannot_be_drafted_count_as_misses(name, view):
    rows = text(rows=2)
    rows.input_ids[:, 10:] = 2 * torch.randint(1, 31, (2, 10))  # from here on, nothing can be drafted
    head = cut(name, ODD).eval()
    loss, whole = loss_of(head, rows, view), loss_of(make(name).eval(), rows, view)
    assert torch.equal(loss.counted, whole.counted) and torch.equal(loss.windows, whole.windows)
    assert (loss.correct[:, -1] < loss.counted).all()
    mask = torch.zeros_like(rows.input_ids, dtype=torch.bool)
    mask[:, 9:] = True
    loss = loss_of(head, rows, view, mask)
    loss.total.backward()
    assert loss.correct.sum() == 0 and loss.counted.sum() > 0
    assert all(torch.isfinite(p.grad).all() for p in head.parameters() if p.grad is not None)


# ----------------------------------------------------------------------------------------------------
# Decoding

LAST = {kind: name for name, (kind, _) in VARIANTS.items()}.values()  # the last variant of each kind
with_draft_vocab = pytest.mark.parametrize(
    ("name", "size"), [*((name, 0) for name in VARIANTS), *((name, 40) for name in LAST)]
)


@with_draft_vocab
def test_answers_are_the_targets_and_simulated_steps_those_of_decoding(name, size):
    head, (target, known) = trained(name, size), texts()
    said = {token for _, answer in known for token in answer}
    assert not size or set(head.draft_vocab.tolist()) < said  # many tokens of the answers cannot be drafted
    for ahead in (False, True):
        engine = DecodingEngine(target, drafter_for(head, target, 12), ahead=ahead)
        results = [engine.generate(prompt, RULES) for prompt, _ in known]
        assert [result.tokens for result in results] == [answer for _, answer in known]
    assert sum(result.target_steps for result in results) < 0.95 * 40 * len(known)  # drafts were accepted
    for (prompt, answer), result in zip(known, results):
        assert simulated(head, target, prompt, answer, 12) == [(len(answer), result.target_steps)]


@with_draft_vocab
def test_a_step_that_runs_ahead_asks_the_host_nothing_and_has_the_sizes_its_settings_say(name, size):
    head, (target, known) = trained(name, size), texts()
    engine = DecodingEngine(target, drafter_for(head, target, 12), ahead=True)
    run, asked, sizes = engine.steps.run, [], set()

    def watched(*arguments):
        with HostQuestions() as questions:
            result = run(*arguments)
        asked.append(questions.asked)
        sizes.add((len(result[0].tree), result[0].tokens.shape[1]))
        return result

    engine.steps.run = watched
    engine.generate(known[0][0], GenerationSettings(24))
    assert len(asked) > 5 and not any(asked), asked
    assert sizes == {(padded_nodes(engine.drafter.max_nodes), engine.drafter.max_depth + 1)}


@with_draft_vocab
def test_every_node_is_scored_as_the_training_forward_scores_its_path(name, size):
    """After steps with partial acceptances: each drafted path against the head along that very text."""
    head, (target, _) = trained(name, size), texts()
    drafter = drafter_for(head, target, 24)
    known = decode_with_partial_acceptances(target, drafter)
    with torch.inference_mode():
        tree = drafter.propose()
    assert len(tree) > 8
    committed, parents, paths = known.shape[1] - 1, tree.parents[0].tolist(), []  # the last token is the base token
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    for path in (paths[node] for node in range(len(tree)) if node not in parents):  # the others are parts of these
        drafted, scores = tree.tokens[0, path], tree.log_probs[0, path]
        row = torch.cat([known, drafted[None]], dim=1)
        rows = Rows.of(torch.empty(0), row)
        states = target.forward_rows(row, rows.segment_ids, rows.position_ids, head.config.target_layers)
        rows = Rows(states[0], row, rows.segment_ids, rows.position_ids, states[1])
        classes = head.draft_classes(drafted)
        assert OUTSIDE not in classes
        with torch.inference_mode():
            by_offset = head.offset_log_probs(rows, torch.tensor([[committed - 1]]), head.draft_view(target.view()))
        length = min(len(path), by_offset.shape[1])  # a CTC head drafts more tokens than a window has labels
        expected = by_offset[0, torch.arange(length), classes[:length]].cumsum(0)
        assert scores[:length].tolist() == pytest.approx(expected.tolist(), abs=1e-3, rel=1e-4)


# ----------------------------------------------------------------------------------------------------
# What it costs at 8B


@every_kind
@pytest.mark.parametrize("whole", [False, True])
def test_a_training_step_stays_in_its_budget_and_reads_nothing_on_the_host(kind, whole, monkeypatch):
    head, peak = step(kind, monkeypatch, draft_vocab_size=0 if whole else 32000)
    used = (peak - sum(2 * p.numel() for p in head.parameters())) / GIB
    budget = head.config.budget.whole_vocabulary if whole else head.config.budget.training
    assert used < budget, f"{used:.2f} GiB beside gradients; the config's budget is {budget}"


@every_kind
def test_a_step_drafts_in_its_budget_of_kernels(kind, monkeypatch):
    drafting, verifying = rehearse(make_engine("llama", kind, monkeypatch))
    assert drafting.total() <= head_classes(kind)[1].budget.drafting * verifying.total(), drafting.most_common(12)


@every_kind
def test_eight_texts_are_drafted_for_in_at_most_a_quarter_more_kernels_than_one(kind, monkeypatch):
    one, eight = (rehearse_batch(*make_drafter("llama", kind, monkeypatch, slots)) for slots in (1, 8))
    assert eight.total() <= 1.25 * one.total(), (one.total(), (eight - one).most_common(12))
