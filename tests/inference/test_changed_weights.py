"""What happens to a model between two answers is noticed: the next answer is that of the model as it is now."""

import copy
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.inference.answers import answer_prompts
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generate import generate_fn
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.cuda_graphs import CapturedSteps
from draft_heads.inference.target.fused_decoder import FusedDecoder
from draft_heads.inference.target.library_names import forward_hooks
from draft_heads.inference.target.target import Target
from draft_heads.inference.target.weights import WeightsSeen
from tests.inference.models import Rerun, in_slots, make_head
from tests.tiny_chat import random_llama

PROMPT, SETTINGS = [5, 6, 7, 9, 8], GenerationSettings(24, ())


def lora(model, r=4, names=("q_proj", "down_proj"), seed=3):
    adapted = get_peft_model(model, LoraConfig(r=r, target_modules=list(names), lora_alpha=64), "first")
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted.eval()


def laid_on(model):
    lora(model)


def laid_on_the_head(model):
    lora(model, names=("lm_head",))


def merged(model):
    lora(model).merge_and_unload()


def removed(model):
    adapted = lora(model)
    plain = expected_tokens(model)
    adapted.unload()
    assert expected_tokens(model) != plain


def new_parameter(model):
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def new_module(model):
    other = random_llama(211).model.layers[1]
    model.model.layers[0].mlp = copy.deepcopy(other.mlp)


def new_layer_norm(model):
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(-1.5)


def loaded(model):
    torch.manual_seed(9)
    model.load_state_dict({name: torch.randn_like(value) * 0.3 for name, value in model.state_dict().items()})


def in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(0.01)


def through_data(model):
    model.lm_head.weight.data.mul_(-1)


def data_of_one_row(model):
    row = expected_tokens(model)[3]
    model.lm_head.weight.data[row] = 0.0


def an_optimizers_step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.05).step()


def back_and_forth(model):
    model.to(torch.float64)
    model.lm_head.weight.data.mul_(-1)
    model.to(torch.float32)


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output)


def hooked_before(model):
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (-2 * args[0],))


def replaced(model):
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda states: -3 * own(states)


def replaced_norm(model):
    norm = model.model.layers[1].input_layernorm
    norm.forward = MethodType(lambda self, states: type(self).forward(self, states) + 0.5, norm)


LAID_ON = (laid_on, laid_on_the_head, hooked, hooked_before, replaced, replaced_norm)
CHANGES = [*LAID_ON, merged, new_parameter, new_module, new_layer_norm, loaded, in_place]
CHANGES += [through_data, data_of_one_row, an_optimizers_step, back_and_forth]


def expected_tokens(model, prompt=PROMPT):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("change", [*CHANGES, removed])
def test_the_next_answer_is_that_of_the_changed_model(change):
    target = Target(random_llama(211))
    drafters = {
        "vanilla": VanillaDrafter(),
        "ngram": NgramDrafter(),
        "head": drafter_for(make_head(target), target, 8),
        "model": DraftModelDrafter(target.without_layers([0])) if target.fused else VanillaDrafter(),
    }
    engines = {name: DecodingEngine(target, drafter) for name, drafter in drafters.items()}
    batch = BatchEngine(target, in_slots(NgramDrafter, 2))
    before = expected_tokens(target.model)
    for engine in engines.values():
        assert engine.generate(PROMPT, SETTINGS).tokens == before
    hashed = target._weights_hashes
    change(target.model)
    after = expected_tokens(target.model)
    assert change is removed or after != before
    if change in LAID_ON:
        engines.pop("model")  # the fused forward does not serve a model with an adapter or hooks laid on
    for name, engine in engines.items():
        assert engine.generate(PROMPT, SETTINGS).tokens == after, name
    assert [answer.tokens for answer in batch.generate([PROMPT] * 2, SETTINGS)] == [after] * 2
    (written,) = answer_prompts(target, [PROMPT], [24], 1)
    assert written.tokens[:24] == after[: len(written.tokens)]
    assert change in (removed, *LAID_ON, data_of_one_row) or target._weights_hashes != hashed


def test_hooks_of_transformers_that_change_nothing_leave_the_fast_forward():
    target = Target(random_llama(211))
    engine, forward, changes = DecodingEngine(target, NgramDrafter()), target.forward_kind, target.changes
    before = engine.generate(PROMPT, SETTINGS).tokens
    target.model(torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True)
    target.model.enable_input_require_grads()
    assert sum(len(module._forward_hooks) for module in target.model.modules()) >= 3
    assert engine.generate(PROMPT, SETTINGS).tokens == before
    assert (target.forward_kind, target.changes) == (forward, changes)
    assert FusedDecoder.can_drive(target.model) == bool(target.fused)


def test_a_hook_that_drafting_cannot_follow_is_refused_until_it_goes():
    target = Target(random_llama(211))
    engine, forward = DecodingEngine(target, NgramDrafter()), target.forward_kind
    before = engine.generate(PROMPT, SETTINGS).tokens

    def negate(module, args, output):
        output.logits = -output.logits
        return output

    hook = target.model.register_forward_hook(negate)  # of the whole model, which drafting does not call
    assert expected_tokens(target.model) != before
    for _ in range(2):
        with pytest.raises(ValueError, match="the target's logits must be its LM head's"):
            engine.generate(PROMPT, SETTINGS)
    hook.remove()
    assert engine.generate(PROMPT, SETTINGS).tokens == before == expected_tokens(target.model)
    assert target.forward_kind == forward


@pytest.mark.parametrize("kind", [DecodingEngine, BatchEngine])
def test_a_drafter_with_more_tokens_than_the_changed_target_is_refused(kind):
    target = Target(random_llama(211))
    drafter = drafter_for(make_head(target), target, 8)  # of 211 tokens
    engine, asked = kind(target, drafter), PROMPT if kind is DecodingEngine else [PROMPT]
    engine.generate(asked, SETTINGS)
    target.model.resize_token_embeddings(200)
    with pytest.raises(ValueError, match=r"the target's vocabulary, 200 for .*; got one of kind ctc with 211"):
        engine.generate(asked, SETTINGS)


def test_an_adapter_that_is_switched_off_and_on_is_followed():
    model = random_llama(211)
    adapted = lora(model)
    adapted.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=64))
    for name, parameter in adapted.named_parameters():
        if "lora_B.second" in name:
            nn.init.normal_(parameter, std=0.5)
    engine = DecodingEngine(Target(model), NgramDrafter())
    answers = []
    for name in ("first", "second", "first"):
        adapted.set_adapter(name)
        answers.append(engine.generate(PROMPT, SETTINGS).tokens)
        assert answers[-1] == expected_tokens(model)
    with adapted.disable_adapter():
        answers.append(engine.generate(PROMPT, SETTINGS).tokens)
        assert answers[-1] == expected_tokens(model)
    assert answers[0] == answers[2] and len({tuple(answer) for answer in answers}) == 3


def test_a_draft_view_and_captured_steps_follow_too():
    """The LM head that a CTC head drafts with is the target's new one, so β is that of a drafter made afresh."""
    target = Target(random_llama(211))
    settings = GenerationSettings(40, ())
    for ahead, captured in ((False, None), (True, CapturedSteps(Rerun))):
        old = drafter_for(head := make_head(target, "ctc"), target, 8)
        engine = DecodingEngine(target, old, ahead, captured)
        engine.generate(PROMPT, settings)
        in_place(target.model)
        answer = engine.generate(PROMPT, settings)
        fresh = DecodingEngine(target, drafter_for(copy.deepcopy(head), target, 8)).generate(PROMPT, settings)
        assert (
            answer.tokens == fresh.tokens == DecodingEngine(target, VanillaDrafter()).generate(PROMPT, settings).tokens
        )
        assert answer.accept_lengths == fresh.accept_lengths


def test_encodings_of_k_grams_are_those_of_the_new_embedding_and_last_while_it_does():
    target = Target(random_llama(211))
    old, fresh = (drafter_for(make_head(target, "chimera", scale=0.3), target, 8, kgram_cache=size) for size in (50, 0))
    drafted = {}
    for drafter in (old, fresh):
        trees, propose = drafted.setdefault(drafter, []), drafter.propose
        drafter.propose = lambda trees=trees, propose=propose: (tree := propose(), trees.append(tree.tokens.tolist()))[
            0
        ]
    engines = [DecodingEngine(target, drafter) for drafter in drafted]
    for repeated in (False, True):
        missed = old.cache.misses
        answers = [engine.generate(PROMPT, SETTINGS) for engine in engines]
        assert (old.cache.misses == missed) == repeated
    in_place(target.model)
    with torch.no_grad():
        target.model.model.embed_tokens.weight.mul_(-1)
    answers = [engine.generate(PROMPT, SETTINGS) for engine in engines]
    assert answers[0].tokens == answers[1].tokens == expected_tokens(target.model)
    assert drafted[old] == drafted[fresh] and old.cache.misses > missed


def test_a_model_that_is_trained_between_two_answers_keeps_generating_its_own_tokens():
    model, function = random_llama(211).train(), generate_fn(NgramDrafter())
    ids = torch.tensor([PROMPT])
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), set()
    for _ in range(3):
        expected = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, custom_generate=function, **options), expected)
        seen.add(tuple(expected[0].tolist()))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 3


@pytest.mark.parametrize("change", [lambda model: model.to(torch.float64), lambda model: model.to(torch.bfloat16)])
def test_a_target_that_was_converted_is_refused(change):
    target = Target(random_llama(211), name="small")
    engine = DecodingEngine(target, VanillaDrafter())
    engine.generate(PROMPT, SETTINGS)
    change(target.model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"small was torch\.float32 on cpu and is torch\..* on cpu; make a"):
            engine.generate(PROMPT, SETTINGS)


def test_nothing_is_merged_again_while_nothing_changes():
    target = Target(random_llama(211))
    engine, fused = DecodingEngine(target, NgramDrafter()), target.fused
    for _ in range(3):
        engine.generate(PROMPT, SETTINGS)
        expected_tokens(target.model)
    assert target.fused is fused and target.changes == 0


@pytest.mark.parametrize("rows", [31, 32, 33, 211])
def test_a_sample_shows_one_value_of_each_row(rows):
    """Of matrices with fewer rows than columns, as many, and several times as many and some."""
    model = random_llama(rows)
    seen = WeightsSeen(model)
    assert seen.still_in(model)
    found = 0
    for row in range(rows):
        kept = model.lm_head.weight.data[row].clone()
        model.lm_head.weight.data[row] += 1
        found += not seen.still_in(model)
        model.lm_head.weight.data[row] = kept
    assert found == rows and seen.still_in(model)


@pytest.mark.parametrize("architecture", ["llama", "gemma", "gemma3_text", "qwen3"])
def test_norms_in_half_precision_follow_an_update_through_data(architecture):
    """As of an average of weights that is copied into a model; Gemma's norms multiply by 1 plus their weight."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 211, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = AutoConfig.for_model(architecture, **sizes, num_attention_heads=4, num_key_value_heads=2)
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), name=architecture)
    engine, prompt = DecodingEngine(target, VanillaDrafter()), torch.tensor(PROMPT)
    engine.generate(PROMPT, SETTINGS)
    before = target.model(prompt[None]).logits[0, -1]
    for name, parameter in target.model.named_parameters():
        if "norm" in name:
            parameter.data.copy_(2 * torch.randn_like(parameter))
    engine.generate(PROMPT, SETTINGS)
    own, drafted = target.model(prompt[None]).logits[0, -1], target.prefill(prompt, target.new_cache(16)).logits
    assert target.forward_kind == "fused" and (own - before).std() > 0.5 * own.std()
    assert (own - drafted).abs().max() < 0.1 * own.std()


def test_a_target_without_layers_follows_the_whole_one():
    target = Target(random_llama(211))
    left = target.without_layers([0])
    in_place(target.model)
    target.refresh()
    left.refresh()
    expected = target.without_layers([0])
    prompt = torch.tensor(PROMPT)
    old, new = (one.prefill(prompt, one.new_cache(16)).logits for one in (left, expected))
    assert torch.equal(old, new) and left.changes == target.changes == 1


def test_a_text_ends_where_another_engine_noticed_other_weights():
    """What it has in its cache is of the old weights; what it would go on with, of the new ones."""
    target = Target(random_llama())
    first, second = (DecodingEngine(target, VanillaDrafter()) for _ in range(2))
    text = first.stream(PROMPT, SETTINGS)
    next(text)
    new_parameter(target.model)
    assert second.generate(PROMPT, SETTINGS).tokens == expected_tokens(target.model)
    with pytest.raises(RuntimeError, match="weights were changed before this text had ended; begin it again"):
        next(text)
    assert first.generate(PROMPT, SETTINGS).tokens == expected_tokens(target.model)


def test_a_forward_that_is_replaced_in_its_class_is_noticed(monkeypatch):
    target = Target(random_llama(211))
    engine = DecodingEngine(target, VanillaDrafter())
    before = engine.generate(PROMPT, SETTINGS).tokens
    kind = type(target.model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, states: -3 * own(self, states))
    after = expected_tokens(target.model)
    assert engine.generate(PROMPT, SETTINGS).tokens == after != before


def test_its_own_forward_compiled_changes_nothing():
    model = random_llama(211)
    for forward in (model.forward, torch.compile(model.forward)):
        model.forward = forward
        assert not forward_hooks(model) and FusedDecoder.can_drive(model)
    model.forward = torch.compile(lambda *args: None)
    assert forward_hooks(model) and not FusedDecoder.can_drive(model)


def test_how_rows_attend_stays_as_it_was_asked_for():
    target = Target(random_llama())
    target.attend("products")
    with torch.no_grad():
        target.model.model.layers[0].mlp.down_proj.weight.mul_(2)
    target.refresh()
    assert target.changes == 1 and target.fused.attention == "products"
