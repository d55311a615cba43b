"""The oracle and its verdicts, on random-weight models whose ties are built by hand."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.evaluation import lossless
from draft_heads.inference.evaluation.hf_generate import sampling_processors
from draft_heads.inference.evaluation.lossless import (
    Difference,
    LosslessCounts,
    Oracle,
    first_difference,
    gap_noise,
    higher_precision,
    judge,
    judge_all,
)
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.sampling import Sampling, gumbel
from draft_heads.inference.target.target import Target
from tests.inference.models import check_prompts

PROMPT = (3, 1, 4, 1, 5)


def settings(**changes):
    return GenerationSettings(**{"max_new_tokens": 12, **changes})


def make_target(dtype=torch.float32, max_positions=64):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().to(dtype)
    tokenizer = SimpleNamespace(
        eos_token_id=None, chat_template=None, decode=lambda ids, **options: "".join(chr(97 + i) for i in ids)
    )
    rest = {"device": "cpu", "dtype": dtype, "max_positions": max_positions, "end_token_ids": ()}
    return SimpleNamespace(model=model, tokenizer=tokenizer, **rest)


@torch.inference_mode()
def greedy(model, prompt, count):
    """The definition: argmax of a fresh forward, one token at a time."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def with_twin_of_the_best_token(target, distance):
    """Make token 39's LM-head row the first answer's plus `distance` of its length: nearly equal logits."""
    best = greedy(target.model, PROMPT, 1)[0]
    weight = target.model.lm_head.weight
    with torch.no_grad():
        weight[39] = weight[best] * (1 - distance)
    return best


# ---- the oracle


def test_the_oracle_is_the_greedy_loop():
    target = make_target(torch.float64)
    assert Oracle(target, settings()).answer(PROMPT) == greedy(target.model, PROMPT, 12)


def test_the_checkpoints_sampling_limits_and_strategy_have_no_say():
    target = make_target(torch.float64)
    plain = greedy(target.model, PROMPT, 12)
    own = dict(do_sample=True, temperature=9.0, top_k=3, num_beams=4, num_return_sequences=2, max_length=7, min_p=0.5)
    own |= dict(use_cache=False, return_dict_in_generate=True, output_scores=True, prompt_lookup_num_tokens=3)
    own = GenerationConfig(**own, stop_strings=["a"], eos_token_id=plain[1], length_penalty=2.0, penalty_alpha=0.6)
    target.model.generation_config = own
    assert Oracle(target, settings()).answer(PROMPT) == plain
    assert target.model.generation_config is own


def test_the_checkpoints_processors_are_the_oracles():
    target = make_target(torch.float64)
    plain = greedy(target.model, PROMPT, 12)
    target.model.generation_config = GenerationConfig(suppress_tokens=[plain[0]])
    assert Oracle(target, settings()).answer(PROMPT)[0] == greedy_without(target.model, PROMPT, plain[0])


def greedy_without(model, prompt, token):
    logits = model(torch.tensor([prompt])).logits[0, -1]
    logits[token] = -torch.inf
    return int(logits.argmax())


def test_noise_and_gaps_are_those_of_the_processed_logits():
    """A bias of 1000 on one token is added in single precision: the gap to the next token is that much larger."""
    target = make_target(torch.float32)
    plain = Oracle(target, settings())
    gap = plain.gap(PROMPT, (), 3, 39)
    target.model.generation_config = GenerationConfig(sequence_bias=[[[3], 1000.0]], suppress_tokens=[5])
    biased = Oracle(target, settings())
    biased.answer(PROMPT)
    assert biased.gap(PROMPT, (), 3, 39) == pytest.approx(1000, abs=gap + 1)
    assert 1e-6 < biased.noise < 1e-3  # no infinite gap counts, and rounding at 1000 does


def test_a_forced_token_has_no_noise():
    target = make_target(torch.float32)
    target.model.generation_config = GenerationConfig(forced_eos_token_id=7)
    oracle = Oracle(target, settings(max_new_tokens=1, eos_token_ids=(7,)))
    assert oracle.answer(PROMPT) == [7] and 0 <= oracle.noise < 1e-4


def test_eos_ends_the_answer_and_counts():
    target = make_target(torch.float64)
    plain = greedy(target.model, PROMPT, 12)
    eos = plain[4]
    ends = settings(eos_token_ids=(39, eos))
    assert Oracle(target, ends).answer(PROMPT) == plain[: plain.index(eos) + 1]


def test_stop_callable_and_stop_strings_cut_the_answer():
    target = make_target(torch.float64)
    plain = greedy(target.model, PROMPT, 12)
    assert Oracle(target, settings(stop=lambda tokens: 3)).answer(PROMPT) == plain[:3]
    assert Oracle(target, settings(stop=lambda tokens: None)).answer(PROMPT) == plain
    word = target.tokenizer.decode(plain[4:7], skip_special_tokens=True)
    cut = Oracle(target, settings(stop_strings=("!!", word))).answer(PROMPT)
    assert target.tokenizer.decode(cut, skip_special_tokens=True).endswith(word)
    assert cut == plain[: len(cut)]


def test_the_context_limit_ends_the_answer():
    target = make_target(torch.float64, max_positions=8)
    assert len(Oracle(target, settings()).answer(PROMPT)) == 3
    with pytest.raises(ValueError, match="8 positions; the prompt has 8 tokens"):
        Oracle(target, settings()).answer(range(8))


def test_answers_are_computed_once_per_prompt(monkeypatch):
    oracle = Oracle(make_target(), settings())
    first = oracle.answer(PROMPT)
    monkeypatch.setattr(lossless, "hf_generate", lambda *given: pytest.fail("asked again"))
    assert oracle.answer(list(PROMPT)) is first


# ---- noise


def test_noise_is_rounding_and_shrinks_with_precision():
    tokens = list(range(30))
    single, double = (gap_noise(make_target(d).model, tokens, "cpu") for d in (torch.float32, torch.float64))
    assert 0 < single < 1e-4
    assert double < single / 100


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=500.0, top_k=30, seed=3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_in_half_precision_holds_what_all_readings_round_alike(dtype, sampling):
    """Judged is a gap one precision higher: a forward's distance from there may be far more than that of two orders.

    A hot draw ranks first what the target finds unlikely, whose logits are larger and rounded more.
    """
    target = make_target(dtype)
    target.model.lm_head.bias = torch.nn.Parameter(torch.arange(40).to(dtype) * -5)  # most tokens are unlikely
    tokens = torch.arange(30)[None]
    exact = copy.deepcopy(target.model).float()(input_ids=tokens).logits[0].detach().double()
    own = target.model(input_ids=tokens, use_cache=False).logits[0].detach().double()
    ranked = exact
    if sampling is not None:
        outside = exact < exact.topk(30).values[:, -1:]
        ranked = (exact / 500).masked_fill(outside, -torch.inf) + gumbel(3, torch.arange(1, 31), exact.shape[1])
    first, second = (own - exact).gather(1, ranked.topk(2).indices).unbind(1)
    noise = gap_noise(target.model, tokens[0].tolist(), "cpu", None, sampling_processors(sampling))
    assert noise >= float((first - second).abs().max()) * (1 - 1e-9) > 0


def test_where_a_forward_overflows_it_excuses_nothing():
    """Logits beyond 65,504 are infinite in float16 and finite one precision higher."""
    target = make_target(torch.float16)
    with torch.no_grad():
        target.model.lm_head.weight[7] = 30_000.0
    logits = target.model(input_ids=torch.arange(30)[None], use_cache=False).logits[0, :, 7]
    assert logits.isinf().any() and logits.isfinite().any()
    assert gap_noise(target.model, list(range(30)), "cpu") < 1000


# ---- verdicts


def test_first_difference():
    assert first_difference([5, 6], [5, 6]) is None
    assert first_difference([5, 6], [5, 7]) == 1
    assert first_difference([5, 6], [5, 6, 7]) == 2
    assert first_difference([], [1]) == 0


def test_equal_answers_are_identical():
    target = make_target()
    oracle = Oracle(target, settings())
    counts = judge_all(oracle, [(PROMPT, tuple(oracle.answer(PROMPT)))])
    assert counts.as_dict() == {"identical_turns": 1, "turns": 1, "near_ties": 0, "unexplained": 0}
    assert counts.tokens == 12
    assert oracle.measured_noise is None


def test_tokens_closer_than_the_noise_are_a_near_tie():
    target = make_target()
    best = with_twin_of_the_best_token(target, 0.0)
    oracle = Oracle(target, settings())
    assert oracle.answer(PROMPT)[0] == min(best, 39)
    difference = judge(oracle, PROMPT, (max(best, 39), 0, 0))
    assert difference.near_tie
    assert (difference.position, difference.gap) == (0, 0.0)
    assert difference.noise > 0


def test_tokens_further_apart_than_the_noise_are_unexplained():
    target = make_target()
    with_twin_of_the_best_token(target, 1e-3)
    difference = judge(Oracle(target, settings()), PROMPT, (39,))
    assert not difference.near_tie
    assert difference.gap > difference.noise > 0


def test_a_token_at_the_cut_of_top_k_or_top_p_is_as_far_as_from_the_cut():
    """Whether the 5th or the 6th token is the last that is kept may be rounding."""
    target = make_target()
    logits = copy.deepcopy(target.model).double()(input_ids=torch.tensor([PROMPT])).logits[0, -1].detach() / 0.5
    values, ranked = logits.sort(descending=True)
    mass = values.softmax(-1).cumsum(-1)
    for warper in ({"top_k": 5}, {"top_p": float((mass[3] + mass[4]) / 2)}):
        oracle, top_p = Oracle(target, settings(temperature=0.5, seed=3, **warper)), warper.get("top_p")

        def from_cut(rank, top_p=top_p):
            """Of the logit, and of the mass of those before it."""
            apart = float(values[rank] - values[5]) if rank < 5 else float(values[4] - values[rank])
            odds = [math.log(x / (1 - x)) for x in (float(mass[rank - 1]), top_p)] if top_p else [math.inf, 0]
            return pytest.approx(min(apart, abs(odds[0] - odds[1])), rel=1e-4)

        fourth, fifth, sixth, tenth = (int(ranked[rank]) for rank in (3, 4, 5, 9))
        assert oracle.gap(PROMPT, (), fifth, sixth) == from_cut(5)
        assert oracle.gap(PROMPT, (), tenth, int(ranked[0])) == from_cut(9)
        kept = oracle.gap(PROMPT, (), fourth, fifth)  # of the likelier one, if that is nearer than the other
        noisy = Oracle(target, settings(temperature=0.5, seed=3)).gap(PROMPT, (), fourth, fifth)
        assert noisy == pytest.approx(kept, rel=1e-5) or kept in (from_cut(3), from_cut(4))
        assert oracle.gap(PROMPT, (), sixth, tenth) == from_cut(9)  # both are left out


def test_a_token_that_top_p_left_out_by_a_mass_near_the_cut_is_near(monkeypatch):
    """In bfloat16 a mass of .7999 and one of .8002 are the same, however far the tokens are from each other."""
    target = make_target()
    probabilities = torch.tensor([0.5, 0.3002, 0.1, *[0.0998 / 37] * 37])
    logits = torch.log(probabilities)[None, None]
    monkeypatch.setattr(target.model, "forward", lambda **given: SimpleNamespace(logits=logits.double()))
    oracle = Oracle(target, settings(temperature=1.0, top_p=0.8, seed=3))
    assert oracle.gap(PROMPT, (), 2, 0) == pytest.approx(math.log(0.8002 / 0.1998) - math.log(4), rel=1e-3)
    far = Oracle(target, settings(temperature=1.0, top_p=0.6, seed=3)).gap(PROMPT, (), 2, 0)
    assert far == pytest.approx(math.log(0.8002 / 0.1998) - math.log(1.5), rel=1e-3)


def test_the_gap_is_measured_one_precision_higher_without_a_second_model():
    target = make_target()
    before = {name: (p.data_ptr(), p.clone()) for name, p in target.model.named_parameters()}
    logits = copy.deepcopy(target.model).double()(input_ids=torch.tensor([PROMPT])).logits[0, -1].detach()
    assert Oracle(target, settings()).gap(PROMPT, (), 3, 39) == float((logits[3] - logits[39]).abs())
    assert all(
        (p.data_ptr(), p.dtype) == (before[name][0], torch.float32) for name, p in target.model.named_parameters()
    )
    assert all(torch.equal(p, before[name][1]) for name, p in target.model.named_parameters())


def test_one_module_at_a_time_is_in_the_higher_precision():
    model, cast = make_target().model, []
    for module in model.modules():  # before those of `higher_precision`, which undo the cast
        module.register_forward_hook(
            lambda module, args, output: cast.append(sum(p.dtype == torch.float64 for p in model.parameters()))
        )
    with torch.no_grad(), higher_precision(model, torch.float64):
        assert model(input_ids=torch.tensor([PROMPT])).logits.dtype == torch.float64
    assert max(cast) == 1  # every module of this model has one parameter, if any


def test_ctrl_c_within_a_module_leaves_no_other_precision():
    model = make_target().model
    before = {name: p.clone() for name, p in model.named_parameters()}

    def interrupted(module, args):
        raise KeyboardInterrupt

    with torch.no_grad(), pytest.raises(KeyboardInterrupt), higher_precision(model, torch.float64):
        model.lm_head.register_forward_pre_hook(interrupted)
        model(input_ids=torch.tensor([PROMPT]))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_float64_allows_no_difference():
    target = make_target(torch.float64)
    best = with_twin_of_the_best_token(target, 0.0)
    difference = judge(Oracle(target, settings()), PROMPT, (max(best, 39),))
    assert not difference.near_tie


def test_a_missing_or_extra_token_is_unexplained():
    oracle = Oracle(make_target(), settings())
    answer = oracle.answer(PROMPT)
    short, long = (judge(oracle, PROMPT, tokens) for tokens in (tuple(answer[:-1]), (*answer, 7)))
    assert (short.position, short.expected, short.received) == (11, answer[-1], None)
    assert (long.position, long.expected, long.received) == (12, None, 7)
    assert not short.near_tie
    assert not long.near_tie


def test_only_the_first_difference_counts():
    target = make_target()
    best = with_twin_of_the_best_token(target, 0.0)
    oracle = Oracle(target, settings())
    answer = oracle.answer(PROMPT)
    far = tuple((token + 1) % 39 for token in answer[1:])
    counts = judge_all(oracle, [(PROMPT, (max(best, 39), *far)), (PROMPT, tuple(answer))])
    assert counts.as_dict() == {"identical_turns": 1, "turns": 2, "near_ties": 1, "unexplained": 0}
    assert counts.flips_per_1000_tokens == 1000 / 24
    assert counts.differences[0].position == 0


def test_counts_add_up():
    tie, gap = Difference(0, 1, 2, True), Difference(0, 1, 2, False)
    total = LosslessCounts([None, tie, gap, None, None], 80)
    assert total.as_dict() == {"identical_turns": 3, "turns": 5, "near_ties": 1, "unexplained": 1}
    assert total.flips_per_1000_tokens == 2000 / 80


def test_check_prompts_decodes_with_the_engine():
    model = make_target(torch.float64).model
    target = Target(model, name="random")
    prompts = [PROMPT, (7, 7, 7), tuple(range(30))]
    longer = settings(max_new_tokens=20)
    oracle = Oracle(target, longer)
    counts = check_prompts(target, VanillaDrafter(), prompts, longer, oracle)
    assert counts.as_dict() == {"identical_turns": 3, "turns": 3, "near_ties": 0, "unexplained": 0}
    assert counts.tokens == 60
    with torch.no_grad():  # the engine now decodes another model than the one the oracle answered with
        model.lm_head.weight[[3, 4]] = model.lm_head.weight[[4, 3]]
    changed = check_prompts(target, VanillaDrafter(), [*prompts, (1,)], longer, oracle)
    assert changed.unexplained > 0
