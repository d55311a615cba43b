"""transformers' `generate` as an engine: the oracle's tokens under every stop rule, and no step too many."""

import json
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.data.text.chat_template import load_tokenizer
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_assisted import _Rounds, hf_engine
from draft_heads.inference.evaluation.hf_generate import HFGenerate, _StopRule, stop_length
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import ContextError, Generation, GenerationSettings, Stopper
from draft_heads.inference.target.target import Target
from tests.inference.models import load_target, make_prompts

TOKENIZER = SimpleNamespace(
    eos_token_id=None, chat_template=None, decode=lambda ids, **options: "".join(chr(200 + i) for i in ids)
)
SAMPLED = [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 7}]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request):
    return load_target(request.param, torch.float64)


@pytest.fixture(scope="module")
def prompts(target):
    made = make_prompts(target, 3)
    target.tokenizer = TOKENIZER
    return made


@pytest.fixture(scope="module")
def prompt(prompts):
    return prompts[0]


def steps_of(target, prompt, settings):
    """The generation, and how many rows each forward of the model had."""
    rows = []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        return HFGenerate(target).generate(prompt, settings), rows
    finally:
        hook.remove()


@pytest.mark.parametrize("sampling", SAMPLED, ids=["greedy", "sampling"])
def test_the_tokens_are_the_oracles_one_step_each(target, prompts, sampling):
    settings = GenerationSettings(24, **sampling)
    for prompt in prompts:
        result, rows = steps_of(target, prompt, settings)
        assert result.tokens == Oracle(target, settings).answer(prompt)
        assert result.tokens == DecodingEngine(target, VanillaDrafter()).generate(prompt, settings).tokens
        assert (len(result.tokens), result.finish_reason) == (24, "length")
        assert result.accept_lengths == [1] * 24 and result.target_steps == 24
        assert rows == [len(prompt)] + [1] * 23  # its cache is in use


def test_all_seconds_are_in_verify(target, prompt):
    seconds = HFGenerate(target).generate(prompt, GenerationSettings(4)).seconds
    assert seconds["verify"] == seconds["total"] > 0
    assert (seconds["draft"], seconds["accept"], seconds["other"]) == (0, 0, 0)


def at(length):
    """A `stop` rule that ends answers at a length, also when asked later."""
    return lambda tokens: length if len(tokens) >= length else None


@pytest.mark.parametrize("sampling", SAMPLED, ids=["greedy", "sampling"])
@pytest.mark.parametrize("rule", ["eos", "stop", "stop_strings", "both", "eos_in_string"])
def test_every_stop_rule_ends_where_the_oracle_ends_and_nothing_is_decoded_beyond(target, prompt, rule, sampling):
    free = HFGenerate(target).generate(prompt, GenerationSettings(40, **sampling)).tokens
    word = TOKENIZER.decode(free[8:11], skip_special_tokens=False)
    given, reason = {
        "eos": ({"eos_token_ids": (210, free[9])}, "eos"),
        "stop": ({"stop": at(7)}, "stop"),
        "stop_strings": ({"stop_strings": ("no such text", word)}, "stop"),
        "both": ({"stop_strings": (word,), "stop": at(5)}, "stop"),
        "eos_in_string": ({"eos_token_ids": (free[10],), "stop_strings": (word,)}, "eos"),
    }[rule]
    settings = GenerationSettings(40, **sampling, **given)
    result, rows = steps_of(target, prompt, settings)
    assert result.tokens == Oracle(target, settings).answer(prompt) == free[: len(result.tokens)]
    assert 0 < len(result.tokens) < 40
    assert result.finish_reason == reason
    assert len(rows) == len(result.tokens)
    vanilla = DecodingEngine(target, VanillaDrafter()).generate(prompt, settings)
    assert (vanilla.tokens, vanilla.finish_reason) == (result.tokens, result.finish_reason)


def test_the_end_of_an_answer():
    text = [ord(letter) - 200 for letter in "abcb"]
    strings = GenerationSettings(stop_strings=("b",))
    assert stop_length(text, strings, TOKENIZER) == 2
    assert stop_length(text[:1], strings, TOKENIZER) is None
    assert stop_length(text, GenerationSettings(stop=lambda tokens: 3), None) == 3
    assert stop_length(text[:2], GenerationSettings(stop=lambda tokens: 3), None) is None


def test_stop_strings_are_those_of_the_answers_text(target):
    """Where the tokenizer's own decode tidies texts up: it writes `a , b` as `a, b`."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "▁,": 2, "▁b": 3}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tidy = {"unk_token": "<unk>", "clean_up_tokenization_spaces": True}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tidy)
    for stop, length in ((" ,", 2), ("a,", None)):
        settings = GenerationSettings(8, stop_strings=(stop,))
        assert stop_length([1, 2, 3], settings, tokenizer) == length
        stopper, result = Stopper(settings, SimpleNamespace(tokenizer=tokenizer, end_token_ids=(0,)), 8), Generation()
        stopper.extend(result, [1, 2, 3], [-1] * 3)
        assert len(result.tokens) == (length or 3) and bool(result.finish_reason) == (length is not None)


def test_a_stop_rule_that_looks_back_or_ahead_cuts_as_the_oracle_does(target, prompt):
    for stop in (lambda tokens: 4 if len(tokens) >= 9 else None, lambda tokens: 6):
        settings = GenerationSettings(20, stop=stop)
        result = HFGenerate(target).generate(prompt, settings)
        assert result.tokens == Oracle(target, settings).answer(prompt)
        assert (len(result.tokens), result.finish_reason) == (stop(range(20)), "stop")


def test_the_context_ends_an_answer_and_a_prompt_beyond_it_is_refused(target, prompt):
    long = (prompt * 20)[: target.max_positions - 3]
    result = HFGenerate(target).generate(long, GenerationSettings(10))
    assert (len(result.tokens), result.finish_reason) == (3, "context")
    assert HFGenerate(target).generate(long, GenerationSettings(3)).finish_reason == "length"
    _, rows = steps_of(target, long, GenerationSettings(1))
    assert rows == [len(long)]
    for wrong in (long + long[:3], []):
        with pytest.raises(ContextError):
            HFGenerate(target).generate(wrong, GenerationSettings(10))


@contextmanager
def skipped_where_generate_fails(target):
    """transformers 5.17's own assisted generation raises an error on a sliding window."""
    try:
        yield
    except RuntimeError as error:
        if target.window and Version(transformers.__version__) < Version("5.24"):
            pytest.skip(f"generate itself: {error}")
        raise


@pytest.mark.parametrize("sampling", SAMPLED, ids=["greedy", "sampling"])
@pytest.mark.parametrize("stop", [None, lambda tokens: 4 if len(tokens) >= 9 else None])
def test_generate_with_drafts_of_its_own_gives_the_same_answer_in_rounds(target, prompts, tmp_path, sampling, stop):
    target.model.save_pretrained(tmp_path / "assistant")
    settings = GenerationSettings(24, stop=stop, **sampling)
    for prompt in prompts:
        plain = HFGenerate(target).generate(prompt, settings)
        for words in ({"prompt_lookup": "4"}, {"assistant": str(tmp_path / "assistant")}):
            with skipped_where_generate_fails(target):
                given = hf_engine(target, words).generate(prompt, settings)
            assert (given.tokens, given.finish_reason) == (plain.tokens, plain.finish_reason)
            assert sum(given.accept_lengths) == len(given.tokens) == len(given.sources)
            assert given.seconds.keys() == {"total"}  # drafting and verification are not timed apart
        if stop is None and not sampling:
            assert given.target_steps < len(given.tokens)  # its own assistant is always right


def test_drafts_that_a_stop_rule_is_asked_of_before_they_are_verified_are_no_text():
    """As transformers 5.17 asks it."""
    answer, stopper = Generation(), SimpleNamespace(extend=lambda answer, new, sources: answer.tokens.extend(new))
    rounds = _Rounds(stopper, answer, 2)
    for verified in ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9, 4]):
        assert not rounds(torch.tensor([[*verified, 1, 2]]), None)
        rounds.forward_begins()
        assert not rounds(torch.tensor([verified]), None)
    assert answer.tokens == [7, 8, 9, 4]


def test_an_answer_with_an_assistant_does_not_depend_on_those_before(target, prompts, tmp_path):
    """Under this schedule `generate` writes into the assistant's config how many drafts come next."""
    target.model.save_pretrained(tmp_path)
    own = {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.0,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    engine, settings = hf_engine(target, {"assistant": str(tmp_path)}), GenerationSettings(24)
    with skipped_where_generate_fails(target):
        first = [engine.generate(prompt, settings).accept_lengths for prompt in prompts]
    alone = [hf_engine(target, {"assistant": str(tmp_path)}).generate(p, settings).accept_lengths for p in prompts]
    assert first == alone == [engine.generate(prompt, settings).accept_lengths for prompt in prompts]
    assert engine._assistant.generation_config.num_assistant_tokens != 3  # it is written, and taken back


def test_an_assistant_of_another_vocabulary_is_refused(target, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=target.vocab_size + 1, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="an assistant has its target's vocabulary, of"):
        hf_engine(target, {"assistant": str(tmp_path)})


def _swap_words(state):
    words = state["model"]["vocab"]
    one, other = list(words)[-2:]
    words[one], words[other] = words[other], words[one]


def _rename_reserved(state):
    """As Llama 3.1's, one of the tokens that Llama 3 reserved."""
    state["added_tokens"][3]["content"] = "<|reserved|>"
    state["model"]["vocab"]["<|reserved|>"] = state["model"]["vocab"].pop("<|system|>")


def _add_token(state):
    """As Qwen3's, behind those of Qwen2.5."""
    state["added_tokens"].append({**state["added_tokens"][0], "id": 1024, "content": "<think>"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_swap_words, "has other ids for 2 of the tokens that both have: drafts may be other words"),
        (lambda state: state["model"]["merges"].clear(), "splits text otherwise: drafts may be other words"),
        (_rename_reserved, None),
        (_add_token, None),
    ],
)
def test_an_assistant_of_another_tokenizer_is_told(tmp_path, caplog, change, told):
    tiny = Target.from_pretrained("tests/tiny_target", device="cpu")
    shutil.copytree("tests/tiny_target", tmp_path / "other")
    tiny.model.save_pretrained(tmp_path / "bare")  # without a tokenizer
    for folder in ("other", "bare"):
        hf_engine(tiny, {"assistant": str(tmp_path / folder)})
    assert not caplog.messages
    file = tmp_path / "other/tokenizer.json"
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))
    config = file.with_name("tokenizer_config.json")  # which would add a token that was renamed once more
    config.write_text(json.dumps({**json.loads(config.read_text()), "extra_special_tokens": []}))
    hf_engine(tiny, {"assistant": str(tmp_path / "other")})
    assert f"that of {tmp_path / 'other'} {told}" in caplog.text if told else not caplog.messages
    read = load_tokenizer(str(tmp_path / "other"))
    assert tokenizer_hash(read) != tokenizer_hash(tiny.tokenizer)  # the change is one


def test_stop_strings_need_a_tokenizer(target, prompt):
    bare = SimpleNamespace(model=target.model, tokenizer=None, device="cpu", max_positions=256)
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        HFGenerate(bare).generate(prompt, GenerationSettings(4, stop_strings=("x",)))


def test_a_rule_that_is_asked_once_more_after_the_end_adds_nothing(target, prompt):
    """As transformers does on devices where it reads the end one step late."""
    answer, settings = Generation(), GenerationSettings(2, ())
    rule = _StopRule(Stopper(settings, target, 2), answer)
    told = [bool(rule(torch.tensor([[*prompt, *range(5, 6 + step)]]), None)) for step in range(3)]
    assert told == [False, True, True] and answer.tokens == [5, 6]
