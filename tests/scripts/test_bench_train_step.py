"""The plain way computes the losses of ours, so that their times compare."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from draft_heads.heads import cross_entropy, ctc_loss
from draft_heads.heads.checkpoint import HEADS
from draft_heads.scripts.bench import train_step
from tests.data.labels.distilling.distilled import run_distill
from tests.running import ROOT
from tests.tiny_chat import save_target, write_sharegpt


def test_the_plain_ctc_loss_is_the_fused_one_bias_included():
    torch.manual_seed(0)
    frames, weight, blank = torch.randn(3, 7, 8), torch.randn(8), torch.randn(1)
    given = frames, weight, blank, torch.randn(11, 8), torch.randint(0, 11, (3, 3))
    given = *given, torch.tensor([3, 2, 0]), torch.tensor([True, False, True]), torch.randn(11)
    ours, theirs = ctc_loss.ctc_loss_fused(*given), train_step.plain_ctc(*given)
    assert torch.allclose(ours[0], theirs[0], atol=1e-4) and torch.equal(ours[1], theirs[1])


def test_the_plain_cross_entropies_are_the_chunked_ones():
    torch.manual_seed(0)
    states, weight, bias, labels = torch.randn(5, 8), torch.randn(11, 8), torch.randn(11), torch.randint(0, 11, (5,))
    ours = cross_entropy.linear_cross_entropy(states, weight, labels, bias)
    assert torch.allclose(ours, train_step.plain_cross_entropy(states, weight, labels, bias), atol=1e-4)
    target = SimpleNamespace(logits=lambda hidden: F.linear(hidden, weight), lm_head_weight=weight)
    for row_weights in (None, torch.rand(5)):
        given = states, weight, torch.randn(5, 8), target, row_weights, bias
        pairs = zip(cross_entropy.soft_cross_entropy(*given), train_step.plain_soft_cross_entropy(*given))
        assert all(torch.allclose(ours, plain, atol=1e-4) for ours, plain in pairs)


def test_what_is_replaced_comes_back():
    replaced = train_step.replaced()
    assert {name for _, name in replaced} == set(train_step.PLAIN)
    before = [getattr(module, name) for module, name in replaced]
    with train_step.plain_functions():
        assert all(getattr(module, name) is train_step.PLAIN[name] for module, name in replaced)
    assert [getattr(module, name) for module, name in replaced] == before


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    target, source = save_target(folder / "target"), write_sharegpt(folder / "chat.json")
    run_distill(target, source, str(folder / "out"), hidden_states="float32", target_layers=[1], labels="generate")
    sizes = {"rows": 2, "tokens_per_batch": 4096, "rows_per_batch": 1}
    files = {"target": str(target), "dataset": str(folder / "out"), "dtype": "float32", "device": "cpu"}
    return SimpleNamespace(**files, **sizes)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_both_ways_have_the_same_loss_of_every_head(given, kind):
    bench = train_step.Bench(given, kind)
    ours, plain = (bench.pass_over(arm) for arm in train_step.ARMS)
    assert ours > 0 and abs(ours / plain - 1) < 1e-4


def test_both_ways_run_the_target_also_over_a_dataset_with_its_states(given):
    bench = train_step.Bench(given, "medusa")
    forwards = []
    bench.target.decoder.register_forward_hook(lambda *given: forwards.append(given))
    for arm in train_step.ARMS:
        forwards.clear()
        bench.pass_over(arm)
        assert len(forwards) == len(bench.batches[arm])
    assert bench.spent["target"] > 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rows", "0"], "--rows must be at least 1; got 0"),
        (["--repeats", "-1"], "--repeats must be at least 1; got -1"),
        (["--rows_per_batch", "0"], "--rows_per_batch must be at least 1"),
        (["--dataset", "nowhere"], "ended with 2"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(given, monkeypatch, capfd, flags, told):
    words = ["--target", given.target, "--dataset", given.dataset, "--heads", "medusa", *flags]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts/bench/train_step.py"), *words])
    assert train_step.exit_status(train_step.run) == 2
    said = capfd.readouterr().err
    assert told in said and "Traceback" not in said


def test_the_process_of_an_arm_gets_each_flag_once(monkeypatch):
    """Its parser would tell the user of flags that are given twice."""
    commands = []

    def run(command, **options):
        commands.append(command[1:])
        return SimpleNamespace(returncode=0, stdout='{"peak_bytes": 7}')

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("sys.argv", ["train.py", "--loss", "ctc", "soft", "--rows", "3", "--hidden=32"])
    assert train_step.peak_in_own_process("--arm", "plain", "--loss", "ctc", "--hidden", "64") == 7
    assert commands == [["train.py", "--rows", "3", "--arm", "plain", "--loss", "ctc", "--hidden", "64"]]
