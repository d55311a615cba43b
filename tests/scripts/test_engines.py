"""What the check of exports in vLLM counts; vLLM itself is not needed here."""

import torch

from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.scripts.checks.engines import acceptance_length, chain_length, report, until_end
from tests.inference.models import ScriptedDrafter, load_target, vanilla_tokens


def test_answers_are_compared_up_to_their_first_end():
    assert until_end([5, 6, 2, 7], (2,)) == [5, 6, 2] and until_end([5, 6], (2,)) == [5, 6]


def test_acceptance_is_counted_as_vllm_counts_it():
    assert acceptance_length({"vllm:spec_decode_num_drafts": 4, "vllm:spec_decode_num_accepted_tokens": 6}) == 2.5


def test_an_answers_last_step_counts_whole():
    """Three drafts a step, all accepted: 4 tokens a step, also where an answer of 6 tokens ends inside one."""
    target = load_target("llama", torch.float64)
    prompt = list(range(3, 30))
    text = vanilla_tokens(target, prompt, GenerationSettings(20))
    engine = DecodingEngine(target, ScriptedDrafter(text, 3))
    assert chain_length(engine, [prompt], 6) == 4


def test_a_worse_acceptance_is_told(capsys):
    target = load_target("llama", torch.float64)
    counted = {"vllm:spec_decode_num_drafts": 100, "vllm:spec_decode_num_accepted_tokens": 100}
    found = {"answers": [[5, 6]], "metrics": counted}
    assert report("x", found, [[5, 6]], target, 2.03) and not report("x", found, [[5, 6]], target, 2.05)
    assert not report("x", found, [[5, 7]], target, 2.0)
    assert "acceptance length 2.000, ours 2.030: good" in capsys.readouterr().out
