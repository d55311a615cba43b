"""Simulated β: the worked example, agreement with decoding for every tree, and a head that stays as it is."""

import copy
from types import SimpleNamespace

import pytest
import torch

from draft_heads.data.collate import DraftCollator
from draft_heads.heads.checkpoint import HEADS
from draft_heads.inference.drafters.heads.fast_weights import prepare_for_drafting
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.replay import replay
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.checks.lossless_matrix import load_target, other_trees
from draft_heads.train.held_out import greedy_answers, replay_answers, replay_drafter, simulation_metrics
from tests.heads.trained import RULES, texts, trained
from tests.inference.models import ScriptedDrafter, oracle_of


def row_of(*turns):
    """A row of the dataset: prompts and answers in turn."""
    ids = [token for turn in turns for token in turn]
    mask = [bool(number % 2) for number, turn in enumerate(turns) for _ in turn]
    return {"input_ids": ids, "greedy_ids": ids, "assistant_mask": mask}


def with_states(batch, layers=()):
    return {**batch, **texts()[0].states_of(batch, layers)}


class Watched(ScriptedDrafter):
    """Drafts a chain after so many committed tokens, and keeps what it observed."""

    def __init__(self, chains):
        super().__init__([], 4)
        self.chains, self.seen = chains, []

    def observe(self, step, slot=None):
        super().observe(step)
        self.seen.append((step.tokens[0].tolist(), step.hidden[0, :, 0].tolist(), int(step.base), int(step.count)))

    def begin(self, slot, prompt, capacity):
        self.committed, self.position = 0, 0

    def propose(self):
        tokens = torch.tensor([self.chains[self.position]])
        return DraftTree.build(tokens, torch.arange(tokens.shape[1])[None] - 1)


def test_the_worked_example_takes_three_steps_for_five_tokens():
    """The answer 1 2 3 4 5 to 9 9: 2 3 8 is drafted after 1, 5 7 after 4. Each token is observed with its own state."""
    drafter = Watched({2: [2, 3, 8], 5: [5, 7]})
    done = replay(drafter, [9, 9], [1, 2, 3, 4, 5], torch.arange(7.0)[:, None])
    assert (done.tokens, done.accept_lengths, done.sources) == ([1, 2, 3, 4, 5], [1, 3, 1], [-1, 0, 0, -1, 0])
    assert drafter.seen == [([9, 9], [0, 1], 1, 2), ([1, 2, 3], [2, 3, 4], 4, 3)]


def test_only_turns_that_are_greedy_throughout_are_replayed():
    """Two packed conversations: P a b P c d with another last token, and P a b that begins where the first ends."""
    row = {
        "mask": torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 1, 0]).bool(),
        "segment_ids": torch.tensor([1, 1, 1, 1, 1, 1, 2, 2, 2, 0]),
        "position_ids": torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 0]),
        "input_ids": torch.tensor([9, 1, 2, 9, 3, 4, 9, 1, 2, 0]),
        "greedy_ids": torch.tensor([-100, 1, 2, 9, 3, 5, -100, 1, 2, -100]),
    }
    assert list(greedy_answers(row)) == [(0, 1, 3), (6, 7, 9)]
    row["mask"][6] = True  # an answer without a prompt
    assert list(greedy_answers(row)) == [(0, 1, 3)]


@pytest.mark.parametrize(("kind", "tree"), [(kind, tree) for kind in HEADS for tree in other_trees(kind)])
def test_simulated_beta_is_the_decoders_beta(kind, tree):
    """Of every head and its usual tree: `tests/test_every_head.py`."""
    head, (target, known), steps = trained(kind, 0), texts(), 0
    engine = DecodingEngine(target, drafter_for(head, target, 16, tree=tree))
    drafter = HEAD_DRAFTERS[kind](prepare_for_drafting(head), target.view(), 16, tree=tree)
    for prompt, answer in known:
        batch = with_states(DraftCollator(0, 256)([row_of(prompt, answer)]), head.config.target_layers)
        decoded = engine.generate(prompt, RULES)
        assert replay_answers(drafter, batch) == [(len(decoded.tokens), decoded.target_steps)]
        steps += decoded.target_steps
    assert steps < 0.95 * len(known) * RULES.max_new_tokens  # drafts were accepted


@pytest.mark.parametrize("kind", HEADS)
def test_every_answer_of_a_row_has_its_conversation_as_prompt(kind):
    """A conversation of two turns, packed behind another one: the same steps as decoding after each prompt."""
    head, (target, known) = trained(kind, 0), texts()
    one, two = (prompt[:20] for prompt, _ in known)
    oracle = oracle_of("llama", torch.float64, RULES)
    first = oracle.answer(one)
    second = oracle.answer([*one, *first, *two])
    rows = [row_of(*known[0]), row_of(one, first, two, second)]
    batch = with_states(DraftCollator(0, 512, packing=True)(rows), head.config.target_layers)
    assert len(batch["input_ids"]) == 1 and int(batch["segment_ids"].max()) == 2
    engine = DecodingEngine(target, drafter_for(head, target, 16))
    decoded = [engine.generate(prompt, RULES) for prompt in (known[0][0], one, [*one, *first, *two])]
    simulated = replay_answers(replay_drafter(head, target, target.view(), 16), batch)
    assert simulated == [(len(answer.tokens), answer.target_steps) for answer in decoded]


def trainer_of(wrapped, rows):
    """As much of a trainer as measures simulated β."""
    device = torch.device("cpu")
    return SimpleNamespace(
        target=wrapped,
        view=wrapped.view(),
        simulate_dataset=rows,
        simulate_nodes=16,
        data_collator=DraftCollator(0, 256),
        args=SimpleNamespace(process_index=0, world_size=1, device=device),
        accelerator=SimpleNamespace(reduce=lambda x: x),
        _prepare_inputs=lambda batch: batch,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["column blocks", "merged"])
@pytest.mark.parametrize("kind", sorted(HEADS))
def test_measuring_leaves_the_head_as_it_was(kind, dtype):
    """Parameters, their gradients and memory, modules and random numbers; then it trains on."""
    target = load_target("llama", dtype)
    head = copy.deepcopy(trained(kind, 0)).to(dtype).train()
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter)
    rows = [row_of(prompt, answer) for prompt, answer in texts()[1]]

    def everything():
        parameters = [(name, id(x), x.data_ptr(), x._version, x.requires_grad, x.grad) for name, x in named(head)]
        modules = [(name, id(module), module.training) for name, module in head.named_modules()]
        return parameters, modules, list(head.state_dict()), torch.get_rng_state().tolist(), vars(head.config).copy()

    def named(head):
        return [*head.named_parameters(), *head.named_buffers()]

    values = {name: value.clone() for name, value in head.state_dict().items()}
    before = everything()
    metrics = simulation_metrics(trainer_of(target, rows), head)
    assert everything() == before and all(torch.equal(values[name], x) for name, x in named(head))
    assert metrics["simulated_beta"] > 1
    assert simulation_metrics(trainer_of(target, rows), head) == metrics
    assert simulation_metrics(trainer_of(target, None), head) == {}


def test_a_head_of_another_type_drafts_as_it_will_when_it_is_loaded():
    """Trained in float32 for a target in bfloat16: the drafter converts its copy, as decoding does."""
    target = load_target("llama", torch.bfloat16)
    head = copy.deepcopy(trained("ctc", 0)).float()
    drafter = replay_drafter(head, target, target.view(), 16)
    assert drafter.head.dtype == torch.bfloat16 and head.dtype == torch.float32
    metrics = simulation_metrics(trainer_of(target, [row_of(*texts()[1][0])]), head)
    assert metrics["simulated_beta"] >= 1
