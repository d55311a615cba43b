"""The n-gram benchmark runs and ends with one line of JSON."""

import json

from draft_heads.scripts.bench import ngram as bench_ngram


def test_it_ends_with_one_json_object(capsys):
    assert bench_ngram.main(["--contexts", "100", "400", "--steps", "20", "--repeats", "2"]) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    ours = {"ngram", "ngram tree", "ngram in Python", "ngram tree in Python"}
    assert last["steps"] == 40 and set(last["results"]) == {*ours, "prompt_lookup"}
    for contexts in last["results"].values():
        assert set(contexts) == {"100", "400"}
        assert all(0 < figures["median_us"] <= figures["p99_us"] for figures in contexts.values())
