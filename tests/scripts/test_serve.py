"""`scripts/serve.py` before it serves: its options, and the text that warms it up."""

import pytest

from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.target.target import Target
from draft_heads.scripts import chat, serve


@pytest.mark.parametrize("key", ["", " ", " key", "key\n", "\tkey", "ké", "a\x00b"])
@pytest.mark.parametrize("from_environment", [False, True])
def test_a_key_that_no_header_can_carry_is_refused(monkeypatch, key, from_environment):
    if from_environment and "\x00" in key:
        pytest.skip("no environment can hold it")
    if from_environment:
        monkeypatch.setenv(serve.API_KEY, key)
    options = serve.parse(["--target", "t", *([] if from_environment else ["--api_key", key])])
    name = serve.API_KEY if from_environment else "--api_key"
    with pytest.raises(ValueError, match=f"no blank at its ends; {name} is"):
        serve.api_key(options)
    monkeypatch.setenv(serve.API_KEY, "a key")
    assert serve.api_key(serve.parse(["--target", "t"])) == "a key"


def test_the_programs_options_are_checked():
    for wrong, told in [
        ("--port 70000", "--port must lie in 0…65535; got 70000"),
        ("--max_waiting 0", "--max_waiting must be at least 1"),
        ("--temperature -1", "temperature must be 0"),
        ("--temperature inf", "temperature must be 0 .* and finite; got inf; leave it out for greedy decoding"),
        ("", "--target"),
    ]:
        arguments = ["--target", "tests/tiny_target", *wrong.split()] if wrong else []
        with pytest.raises((ValueError, SystemExit), match=told if wrong else None):
            serve.parse(arguments)


@pytest.mark.parametrize(
    ("program", "wrong", "told"),
    [
        (serve, ["--port", "0", "--drafter", "nonsense"], "a drafter is one of .* got 'nonsense'"),
        (serve, ["--port", "0", "--threads", "-1"], "--threads must be 0"),
        (chat, ["--drafters", "nonsense"], "a drafter is one of .* got 'nonsense'"),
        (chat, ["--threads", "-1"], "--threads must be 0"),
    ],
)
def test_what_is_wrong_with_other_options_is_told_before_the_target_is_loaded(program, wrong, told, monkeypatch):
    monkeypatch.setattr("sys.argv", ["program", "--target", "no/such/target", *wrong])
    with pytest.raises(ValueError, match=told):
        program.run()


def test_a_drafter_that_carries_over_learns_nothing_of_the_text_that_warms_it_up():
    target = Target.from_pretrained("tests/tiny_target", device="cpu")
    builder, spec = DrafterBuilder(target), DrafterSpec.parse("ngram,keep=1")
    engine = DecodingEngine(target, builder.build(spec))
    serve.warm_up(engine)
    fresh = DecodingEngine(target, builder.build(spec))
    own = engine.generate("Name a fruit.").accept_lengths
    assert own == fresh.generate("Name a fruit.").accept_lengths
    assert engine.drafter.table.grams() == fresh.drafter.table.grams()
