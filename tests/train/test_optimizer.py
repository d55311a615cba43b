"""Muon and AdamW as one optimizer: who updates what, schedules, and a resume in the middle."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from draft_heads.heads.chimera import ChimeraConfig, ChimeraHead
from draft_heads.train.inherited import OPTIMIZERS
from draft_heads.train.optimizer import Muon, MuonWithAdamW, orthogonalised
from draft_heads.train.run import memory_sizes
from tests.heads.small import disturbed


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3, bias=False))
    return model, MuonWithAdamW(model.named_parameters(), ("1.weight",), 0.01, 0.1, (0.9, 0.999))


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_muon_gets_the_matrices_asked_for_and_adamw_the_rest():
    model, optimizer = make()
    muon, adamw = optimizer.parts
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(4, 6)]
    assert {tuple(p.shape) for p in adamw.param_groups[0]["params"]} == {(4,), (3, 4)}
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, 1)
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_head_may_have_no_parameters_beside_those_of_muon():
    matrix = nn.Parameter(torch.ones(3, 2))
    optimizer = MuonWithAdamW([("weight", matrix)], (), 0.01, 0.1, (0.9, 0.999))
    assert [type(part) for part in optimizer.parts] == [Muon]
    matrix.sum().backward()
    optimizer.step()
    assert not torch.equal(matrix, torch.ones(3, 2))


def test_a_head_of_vocabulary_tables_alone_has_nothing_for_muon():
    """Whose rate and weight decay would be another optimizer's, or none's."""
    with pytest.raises(ValueError, match="this head has none; pass --head_optimizer adamw, with its --learning_rate"):
        MuonWithAdamW([("weight", nn.Parameter(torch.ones(3, 2)))], ("weight",), 0.01, 0.1, (0.9, 0.999))


def test_a_schedule_reaches_both_parts():
    _, optimizer = make()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.005, 0.005]


def test_saved_and_loaded_it_goes_on_as_if_never_stopped():
    whole, optimizer = make()
    for seed in range(3):
        step(whole, optimizer, seed)
    model, half = make()
    step(model, half, 0)
    again, loaded = make(seed=9)
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(half.state_dict()))
    for seed in (1, 2):
        step(again, loaded, seed)
    for got, want in zip(again.parameters(), whole.parameters()):
        assert torch.allclose(got, want, atol=1e-7)


def test_a_muon_step_is_torchs_own():
    """torch orthogonalises in bfloat16; two steps agree to its precision."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(24, 40)) for _ in range(2))
    optimizers = (
        Muon([ours], 1e-2, 0.1),
        torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(2):
        ours.grad = torch.randn(24, 40)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - 1).abs().max()
    assert (ours - theirs).abs().max() < 0.05 * moved


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_orthogonalising_brings_all_singular_values_near_one(shape):
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(*shape)))
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("name", [*OPTIMIZERS, "muon"])
def test_the_plan_tells_the_memory_that_an_optimizer_takes(name, tmp_path):
    """Compared with what it keeps after a step of a head of which a part is frozen."""
    head = disturbed(ChimeraHead, ChimeraConfig, encoder="target_layer0_frozen")
    args = TrainingArguments(str(tmp_path), optim="sgd" if name == "muon" else name, report_to="none", use_cpu=True)
    trained = [p for p in head.parameters() if p.requires_grad]
    if name == "muon":
        optimizer = MuonWithAdamW(head.named_parameters(), head.tables, 0.01, 0.1, (0.9, 0.999))
    else:
        made, options = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = made(trained, **options)
    for p in trained:
        p.grad = torch.randn_like(p)
    optimizer.step()
    parts = getattr(optimizer, "parts", [optimizer])
    kept = [x for part in parts for state in part.state.values() for x in state.values() if torch.is_tensor(x)]
    told = SimpleNamespace(optim=args.optim, head_optimizer="muon" if name == "muon" else "adamw")
    parts = {"model": nn.Module(), "embedding": nn.Module(), "lm_head": nn.Module()}
    target = SimpleNamespace(runs=True, split=False, dtype=torch.float32, **parts)
    trainer = SimpleNamespace(model=head, args=told, target=target)
    sizes = memory_sizes(trainer, sum(p.numel() for p in trained))
    assert sizes["optimizer"] == 4 * sum(x.numel() for x in kept if x.dim())
