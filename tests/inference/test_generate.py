"""`model.generate(custom_generate=…)`: the tokens of `generate` itself, or a refusal."""

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generate import generate_fn
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.library_names import CACHE
from draft_heads.inference.target.target import Target
from draft_heads.scripts.checks.architectures import make_model
from tests.inference.models import load_target, make_head, make_prompts, small_model
from tests.tiny_chat import render_prompt


@pytest.fixture(scope="module")
def target():
    return load_target("llama", torch.float64)


@pytest.fixture(scope="module")
def tiny():
    """A target with a tokenizer, and a prompt."""
    target = Target.from_pretrained("tests/tiny_target", device="cpu")
    return target, render_prompt(target.tokenizer, [{"role": "user", "content": "Name a fruit."}])


FREE = {
    "vanilla": lambda target: VanillaDrafter(target.device),
    "ngram": lambda target: NgramDrafter(branches=2, keep=1),
    "prompt_lookup": lambda target: PromptLookupDrafter(),
    "lookahead": lambda target: LookaheadDrafter(n=3, w=4),
    "draft_model": lambda target: DraftModelDrafter(small_model()),
    "ouroboros": lambda target: OuroborosDrafter(small_model(), gamma=2, w=3, p=3),
    "hybrid": lambda target: HybridDrafter(
        [("ctc", drafter_for(make_head(target), target, 8)), ("ngram", NgramDrafter())], target, 8
    ),
}


@pytest.fixture(scope="module", params=["ctc", "chimera", *FREE])
def drafter(request, target):
    if request.param in FREE:
        return FREE[request.param](target)
    return drafter_for(make_head(target, request.param), target, 8)


def both(target, drafter, prompts, **settings):
    """What transformers says and what we say."""
    ids = torch.tensor(prompts)
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    run = {"attention_mask": mask, "max_new_tokens": 24, "pad_token_id": 0, **settings}
    return target.model.generate(ids, **run), target.model.generate(ids, **run, custom_generate=generate_fn(drafter))


def test_the_tokens_are_those_of_generate(target, drafter):
    for prompt in make_prompts(target, 3):
        expected, ours = both(target, drafter, [prompt], do_sample=False)
        assert torch.equal(expected, ours)


def test_lists_of_eos_and_stopping_criteria_end_where_generate_ends(target, drafter):
    prompt = make_prompts(target, 1)[0]
    free = both(target, drafter, [prompt], do_sample=False)[0][0, len(prompt) :].tolist()

    class AtLength(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= len(prompt) + 7)

    for settings in (
        {"eos_token_id": [free[9], free[4]]},
        {"stopping_criteria": StoppingCriteriaList([AtLength(), MaxTimeCriteria(1000)])},
    ):
        expected, ours = both(target, drafter, [prompt], do_sample=False, **settings)
        assert torch.equal(expected, ours) and ours.shape[1] < len(prompt) + 24


def test_stop_strings_given_as_a_criterion_end_where_generate_ends(tiny):
    target, prompt = tiny
    text = {"input_ids": torch.tensor([prompt]), "max_new_tokens": 24, "do_sample": False}
    free = target.model.generate(**text)[0, len(prompt) :].tolist()
    stop = target.tokenizer.decode(free[3:5])
    expected = target.model.generate(**text, stop_strings=[stop], tokenizer=target.tokenizer)
    criteria = [StopStringCriteria(target.tokenizer, [stop])]
    ours = target.model.generate(**text, stopping_criteria=criteria, custom_generate=generate_fn(NgramDrafter()))
    assert torch.equal(expected, ours) and len(prompt) < ours.shape[1] <= len(prompt) + 5


def test_left_padded_batches_are_decoded_one_by_one(target, drafter):
    short, long = sorted(make_prompts(target, 2), key=len)
    padding = len(long) - len(short)
    mask = torch.tensor([[0] * padding + [1] * len(short), [1] * len(long)])
    expected, ours = both(target, drafter, [[0] * padding + short, long], attention_mask=mask, do_sample=False)
    assert torch.equal(expected, ours)


def test_drawn_tokens_depend_on_torchs_seed_and_not_on_the_drafter(target, drafter):
    prompt = torch.tensor([make_prompts(target, 1)[0]])
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 16, "pad_token_id": 0}

    def drawn(with_drafter, seed):
        torch.manual_seed(seed)
        mask = torch.ones_like(prompt)
        return target.model.generate(prompt, attention_mask=mask, **settings, custom_generate=generate_fn(with_drafter))

    plain = VanillaDrafter(target.device)
    assert torch.equal(drawn(drafter, 1), drawn(plain, 1))
    assert not torch.equal(drawn(plain, 1), drawn(plain, 2))


class Collector:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()  # `generate` puts the prompt itself, [1, L]

    def end(self):
        self.ended = True


def test_a_streamer_receives_every_token_once(target, drafter):
    prompt = make_prompts(target, 1)[0]
    collector = Collector()
    ids = torch.tensor([prompt])
    answer = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0,
        custom_generate=generate_fn(drafter), streamer=collector,
    )  # fmt: skip
    assert collector.ended and collector.tokens == answer[0].tolist()


@pytest.mark.parametrize(
    "settings,told",
    [
        (
            {"do_sample": True, "min_p": 0.1},
            "drafting supports temperature, top_k, top_p and transformers' processors of the text so far; got MinP",
        ),
        ({"num_beams": 2}, "num_beams=2"),
        (
            {"num_return_sequences": 2, "do_sample": True, "streamer": Collector()},
            "a streamer shows one sequence; got 2",
        ),
        ({"return_dict_in_generate": True, "output_scores": True}, "token ids only; got return_dict_in_generate"),
    ],
)
def test_what_drafting_cannot_honour_is_refused(target, settings, told):
    ids = torch.tensor([make_prompts(target, 1)[0]])
    with pytest.raises(ValueError, match=told):
        target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, pad_token_id=0,
            **{"do_sample": False, **settings},
            custom_generate=generate_fn(VanillaDrafter(target.device)),
        )  # fmt: skip


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_a_cache_is_refused_filled_or_empty_as_generate_would_fill_it(target, name):
    """By the name of the installed transformers and by that of earlier ones, which `generate` goes on taking."""
    run = {"inputs": torch.tensor([[5, 6, 7]]), "do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    filled = target.model(input_ids=torch.tensor([[5, 6]]), use_cache=True)[CACHE]
    for cache, told in ((DynamicCache(), "fills no other"), (filled, "starts with an empty cache")):
        with pytest.raises(ValueError, match=told):
            target.model.generate(**run, custom_generate=generate_fn(VanillaDrafter()), **{name: cache})


@pytest.mark.parametrize("own", [{}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("asked", [{}, {"repetition_penalty": 1.0}, {"repetition_penalty": 1.2, "min_new_tokens": 9}])
def test_processors_of_the_text_are_those_of_the_call(own, asked):
    """Not those of the checkpoint, where the call says otherwise."""
    target, prompt = load_target("llama", torch.float64), [5, 6, 7, 5, 6, 30, 31, 7, 5, 6]
    target.model.generation_config.update(**own)
    expected, ours = both(target, NgramDrafter(), [prompt], do_sample=False, eos_token_id=[3, 5], **asked)
    assert torch.equal(expected, ours)


def test_processors_of_the_text_take_one_sequence():
    target = load_target("llama", torch.float64)
    with pytest.raises(ValueError, match="one sequence without padding; got 2 sequences and padding of 0 tokens"):
        both(target, VanillaDrafter(), [[5, 6, 7], [5, 6, 8]], repetition_penalty=1.2)
    with pytest.raises(ValueError, match="got 1 sequences and padding of 1 tokens"):
        both(target, VanillaDrafter(), [[0, 6, 7]], attention_mask=torch.tensor([[0, 1, 1]]), repetition_penalty=1.2)


def test_images_and_padding_behind_a_text_are_refused(target):
    """transformers knows that this target takes no images before it calls us, so the loop itself is asked."""
    run = {"logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList()}
    run |= {"model": target.model, "input_ids": torch.tensor([[5, 6, 7]]), "pixel_values": torch.zeros(1)}
    with pytest.raises(ValueError, match="reads nothing beside it; got pixel_values"):
        generate_fn(VanillaDrafter())(**run, generation_config=target.model.generation_config)
    with pytest.raises(ValueError, match="got other position_ids; leave them out"):
        both(target, VanillaDrafter(), [[5, 6, 7]], position_ids=torch.tensor([[3, 4, 5]]))
    with pytest.raises(ValueError, match="padded on the left; got an attention mask with zeros after ones"):
        both(target, VanillaDrafter(), [[5, 6, 7]], attention_mask=torch.tensor([[1, 1, 0]]))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_multimodal_models_go_on_with_texts(name, tmp_path):
    """transformers tells them that there are no images, and Qwen's positions have several axes."""
    make_model(name, tmp_path)
    model = Target.from_pretrained(str(tmp_path), device="cpu").model
    run = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    run |= {"input_ids": torch.tensor([[0, 6, 7, 8], [5, 6, 7, 8]])}
    run |= {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}
    run |= {"mm_token_type_ids" if name == "qwen2_5_vl" else "token_type_ids": torch.zeros(2, 4, dtype=torch.long)}
    assert torch.equal(model.generate(**run), model.generate(**run, custom_generate=generate_fn(VanillaDrafter())))


def test_the_weights_are_not_merged_again(target):
    engine = DecodingEngine(target, VanillaDrafter())
    engine.generate([5, 6, 7], GenerationSettings(4))
    made = []
    remembered = Target.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Target, "__init__", lambda self, *args, **options: made.append(remembered(self, *args, **options))
        )
        both(target, VanillaDrafter(), [[5, 6, 7]])
    assert not made


def test_each_row_of_a_batch_is_drawn_for_itself(target, drafter):
    torch.manual_seed(0)
    prompts = torch.tensor([[5, 6, 7]] * 3)
    options = dict(max_new_tokens=12, do_sample=True, top_k=0, custom_generate=generate_fn(drafter))
    drawn = target.model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    assert len({tuple(row) for row in drawn.tolist()}) == 3


def test_a_model_without_a_pad_token_is_padded_as_generate_does():
    target = load_target("llama", torch.float64)
    target.model.generation_config.pad_token_id = None
    prompts = torch.tensor([[5, 6, 7], [7, 8, 9], [3, 1, 4]])
    options = dict(max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(prompts))
    whole = target.model.generate(prompts, **options)
    end = int(whole[0, 8])  # the first answer ends early, at least
    options |= {"eos_token_id": end}
    expected = target.model.generate(prompts, **options)
    found = target.model.generate(prompts, custom_generate=generate_fn(VanillaDrafter()), **options)
    assert torch.equal(found, expected)
