"""The batched greedy answers against transformers' own generate, and the frozen target's labels."""

import pytest
import torch
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM, T5Config, T5ForConditionalGeneration

from draft_heads.data.answers import answer_prompts
from draft_heads.data.frozen_target import load_target, wrap_target
from draft_heads.data.loops import loop_start
from tests.tiny_chat import byte_tokenizer, random_llama, save_target, template

PROMPTS = [[5 + (7 * i + 3 * j) % 290 for j in range(4 + 5 * i)] for i in range(7)]


def target_of(model, ends):
    return wrap_target(model.double(), byte_tokenizer(template("chatml")), ends)


def generate(model, prompt, limit, ends):
    config = GenerationConfig(do_sample=False, max_new_tokens=limit, eos_token_id=ends, pad_token_id=0)
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


def sliding_mistral():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=8,
        initializer_range=0.3,
    )
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("make", [random_llama, sliding_mistral])
def test_batched_answers_equal_generate_one_by_one(make):
    model = make()
    free = [generate(model.double(), prompt, 24, None) for prompt in PROMPTS]
    ends = sorted({free[0][3], free[2][8], free[5][15], 2})  # tokens the model does say, so that answers end
    answers = answer_prompts(target_of(model, ends), PROMPTS, [24] * 7, batch_size=4)
    assert [answer.tokens for answer in answers] == [generate(model, prompt, 24, ends) for prompt in PROMPTS]
    assert [answer.finish for answer in answers] == [
        "end" if answer.tokens[-1] in ends else "limit" for answer in answers
    ]
    assert {"end"} < {answer.finish for answer in answers}


def test_each_answer_has_its_own_limit():
    target = target_of(random_llama(), [299])
    answers = answer_prompts(target, PROMPTS, [1, 2, 3, 4, 5, 6, 7], batch_size=7)
    assert [len(answer.tokens) for answer in answers] == [1, 2, 3, 4, 5, 6, 7]


def test_looping_answer_is_cut_at_the_start_of_its_loop():
    model = random_llama(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    target = target_of(model, [299])
    whole = answer_prompts(target, PROMPTS, [120] * 7, batch_size=7)
    cut = answer_prompts(target, PROMPTS, [120] * 7, batch_size=7, cut_loops=True)
    starts = [loop_start(answer.tokens) for answer in whole]
    assert any(starts)
    for answer, short, start in zip(whole, cut, starts):
        assert short.tokens == answer.tokens[:start]
        assert short.finish == ("limit" if start is None else "loop")


def test_labels_are_the_models_choice_one_position_earlier():
    model = random_llama()
    target = target_of(model, [2])
    labelled = target.label(PROMPTS, keep_hidden=True)
    for prompt, (greedy, hidden) in zip(PROMPTS, labelled):
        out = model(torch.tensor([prompt]), output_hidden_states=True)
        assert greedy == [-100] + out.logits[0, :-1].argmax(-1).tolist()
        assert hidden.shape == (len(prompt), 32)
        torch.testing.assert_close(hidden, out.hidden_states[-1][0])


def test_target_loads_with_every_end_token_and_frozen(tmp_path):
    target = load_target(save_target(tmp_path, extra_end=7))
    assert target.end_ids == [2, 4, 7]  # eos, the template's <|im_end|>, the generation config's
    assert (target.max_positions, target.model.dtype) == (256, torch.float32)
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_encoder_decoder_target_is_refused_in_a_sentence(tmp_path):
    sizes = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8, "vocab_size": 300}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    byte_tokenizer(template("chatml")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--target .* is an encoder-decoder model \(t5\)"):
        load_target(str(tmp_path))


def test_target_whose_logits_are_scaled_is_refused():
    class Scaled(type(random_llama())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    with pytest.raises(ValueError, match="logits of Scaled are not lm_head"):
        wrap_target(Scaled(random_llama().config).eval(), byte_tokenizer(template("chatml")), [2])


def test_unknown_precision_lists_the_valid_ones(tmp_path):
    with pytest.raises(ValueError, match="--dtype half is unknown; pass one of float32, float16, bfloat16"):
        load_target(str(tmp_path), dtype="half")
