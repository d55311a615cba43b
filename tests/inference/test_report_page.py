"""report.html: what it shows, what it escapes, that it needs nothing else, and that it holds in a browser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from draft_heads.inference.evaluation.html import charts
from draft_heads.inference.evaluation.html.answers import answers_view, source_colours, source_counts
from draft_heads.inference.evaluation.html.page import page
from draft_heads.inference.evaluation.metrics import beta_interval
from draft_heads.inference.evaluation.report import build_report, write_report
from draft_heads.scripts.checks.report_page import browse, check, chromium, faults
from tests.inference.stub_engine import StubEngine, StubOracle, benchmark, evaluate, question, render

TARGET = {"path": "models/stub", "parameters": 1234567, "dtype": "float32", "device": "cpu"}
SETTINGS = {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "max_nodes": 32}
ODD = ("<script>alert(1)</script>", "\"quoted\" & 'single'", "שלום עולם", "🙂👩‍👩‍👧", "</script><b>", "a|b`c`$d$")
SAMPLE = {
    "benchmark": "bench",
    "question_id": 1,
    "question": "Say <b>four</b>.",
    "drafter": "fast",
    "source_names": ["ctc", "ngram"],
    "finish_reason": "eos",
    "answer_tokens": 6,
    "texts": ["a", "<b>", "", "🙂", "\n", ""],
    "sources": [-1, 0, 1, -1, 0, -1],
    "accept_lengths": [1, 3, 2],
    "measured_steps": 3,
    "trees": [
        None,
        {"texts": ["<b>", "\ufffd", "x"], "parents": [-1, 0, -1], "sources": [0, 1, 0], "accepted": [0, 1]},
        {"texts": ["\n"], "parents": [-1], "sources": [0], "accepted": [0]},
    ],
}
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """The elements of a page with their text; fails where tags do not close in order."""

    def __init__(self, source):
        super().__init__()
        self.open, self.found, self.text = [], [], {}
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, len(self.found) - 1))

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, index in self.open:
            self.text[index] = self.text.get(index, "") + data

    def texts(self, tag, **attributes):
        """The text of each element with these attributes."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            self.text.get(index, "")
            for index, (name, has) in enumerate(self.found)
            if name == tag and wanted.items() <= has.items()
        ]


def report_of(names=("fast", "broken"), category="writing", samples=(SAMPLE,)):
    questions = [question(1, category, "abcd", "efg"), question(2, "math", "hi"), question(3, "math", "jk")]
    engines = {"vanilla": StubEngine(), names[0]: StubEngine(2, 0.004), names[1]: StubEngine(spoil=0)}
    found = evaluate(engines, StubOracle(), [benchmark(questions), benchmark(name="other")], render)
    return build_report(found, TARGET, SETTINGS, 0, "python evaluate.py", samples=samples)


@pytest.fixture(scope="module")
def report():
    return report_of()


def test_the_page_has_the_figures_as_tables_and_as_bars(report):
    shown = Page(page(report))
    cells = shown.texts("td")
    assert "2.50×" in cells and "0/4, 4 UNEXPLAINED" in cells
    assert {"Results", "Speed", "Answers token by token", "Settings, versions and command"} <= set(shown.texts("h2"))
    assert "fast: 2.50× (2.50–2.50)" in shown.texts("title")
    assert "fast: verify 50.0%" in shown.texts("title")
    assert "fast\ndraft 1: 83%" in shown.texts("title")  # 5 of 6 steps
    assert [row for row in shown.texts("tr", class_="bad") if "broken" in row]
    assert shown.found[0] == ("html", {"lang": "en"})


def test_verification_cost_is_drawn_by_nodes_and_has_its_seconds_and_steps_in_a_table(report):
    assert "Verification cost by nodes of a tree" not in page(report)  # the stub's steps are not timed one by one
    costs = [(4, 12, 0.002, 1.0), (8, 5, 0.003, 1.5), (9, 4, 0.03, 15.0)]
    keys = ("nodes", "steps", "seconds", "over_plain_step")
    row = {**report["results"][1], "verify_cost": [dict(zip(keys, cost)) for cost in costs]}
    shown = Page(page({**report, "results": [report["results"][0], row]}))
    titles = [title for title in shown.texts("title") if "nodes" in title]
    assert titles == ["fast\nnodes 4: 1.00", "fast\nnodes 8: 1.50"]  # of 9 nodes there are too few steps
    assert [row for row in shown.texts("tr") if row.startswith("fast9430.0015.00×")]


def test_the_page_needs_no_other_file_and_no_network(report):
    shown = Page(page(report))
    addresses = [has[name] for _, has in shown.found for name in ("src", "href") if name in has]
    assert addresses == ["data:,"]
    assert not re.search(r"@import|url\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)", page(report))


def test_the_token_views_counts_are_those_of_the_json(report):
    shown = Page(page(report))
    assert shown.texts("span", data_count="tokens") == ["6"] and shown.texts("span", data_count="steps") == ["3"]
    assert [shown.texts("span", data_source=name) for name in ("ctc", "ngram", "base token")] == [["2"], ["1"], ["3"]]
    assert source_counts(SAMPLE) == {"ctc": 2, "ngram": 1, "base token": 3}
    assert shown.texts("span", class_="step") == ["a", "<b>🙂", "\n"]
    assert "".join(shown.texts("p", class_="answer")) == "a<b>🙂\n"
    looks = [has["class"].split()[1:] for tag, has in shown.found if tag == "span" and "token" in has.get("class", "")]
    assert looks[0] == ["own"] and looks[2][-1] == "part" and looks[4][-1] == "newline" and looks[5][-1] == "end"
    (data,) = shown.texts("script", id="samples")
    assert json.loads(data) == [SAMPLE]


def test_what_a_shortened_or_untraced_sample_leaves_out_is_said():
    shown = answers_view([{**SAMPLE, "answer_tokens": 90, "measured_steps": 5, "trees": None}], {}, {})
    assert "The first 6 of 90 tokens. The measured run took 5 steps" in shown and "Trees were not recorded." in shown
    faster = answers_view([{**SAMPLE, "measured_steps": 2}], {}, {})  # of a hybrid, which knows no text
    assert "The measured run took 2 steps for them; the drafter has learnt since, or half" in faster


def test_sources_have_the_colour_of_the_drafter_with_their_name():
    assert source_colours([SAMPLE], {"ngram": 0}) == {"ngram": 0, "ctc": 1}
    many = {**SAMPLE, "source_names": [f"s{index}" for index in range(9)]}
    assert [*source_colours([many], {}).values()] == [0, 1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("odd", ODD)
def test_whatever_comes_from_data_is_escaped(odd):
    sample = {
        **SAMPLE,
        "drafter": odd,
        "question": odd,
        "texts": [odd, *SAMPLE["texts"][1:]],
        "source_names": [odd, "b"],
    }
    source = page(report_of((odd, "broken"), odd, [{**sample, "benchmark": odd}]))
    shown = Page(source)  # every tag closes in order
    assert [has for tag, has in shown.found if tag == "b"] == []
    assert sum(tag == "script" for tag, _ in shown.found) == 2
    assert odd in shown.texts("bdi") and odd in shown.texts("p", class_="question")
    assert json.loads(shown.texts("script", id="samples")[0])[0]["texts"][0] == odd


def test_beta_is_drawn_over_answers_of_more_than_one_span(report):
    assert "β along the answers" not in page(report)
    rows = [row | {"beta_by_output_position": [1.5, 2.25]} for row in report["results"]]
    titles = Page(page({**report, "results": rows})).texts("title")
    assert "fast\n128 tokens from 0: 1.50" in titles and "fast\n128 tokens from 128: 2.25" in titles


def test_spans_and_turns_in_which_no_step_began_are_left_out(report):
    figures = {"beta_by_output_position": [129.0, None, 6.5], "beta_by_turn": [None, 7.77]}
    shown = Page(page({**report, "results": [row | figures for row in report["results"]]}))
    titles = [title for title in shown.texts("title") if title.startswith("fast\n128 tokens")]
    assert set(titles) == {"fast\n128 tokens from 0: 129.00", "fast\n128 tokens from 256: 6.50"}
    cells = shown.texts("td")
    assert cells[cells.index("7.77") - 1] == "–"


def test_replayed_answers_have_no_speed_to_show():
    report = {**report_of(samples=()), "target": None, "settings": {"answers": "a.jsonl", "max_nodes": 8}}
    for row in report["results"]:
        nothing = ("gamma", "gamma_ci95", "over_transformers", "tokens_per_second", "lossless", "time_share")
        row |= dict.fromkeys((*nothing, "wall_seconds"))
    source = page(report)
    assert "γ, times faster" not in source and "β, new tokens" in source and "<h1>Replayed answers" in source
    assert "Decoding time" not in source and "token by token" not in source


def contrast(one, other):
    """WCAG's contrast ratio of two colours `#rrggbb`."""
    lights = []
    for colour in (one, other):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_text_and_marks_have_enough_contrast_in_both_themes():
    style = Path(charts.__file__).with_name("page.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in style.split("@media (prefers")[:2]]
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for theme in themes:
        for name in ("fg", "muted", "bad", "link"):
            assert contrast(theme[name], theme["bg"]) >= 4.5 and contrast(theme[name], theme["soft"]) >= 4.5, name
        for name in [*(f"c{index}" for index in range(charts.COLOURS)), "g0", "g1"]:
            assert contrast(theme[name], theme["bg"]) >= 3, name


def test_bars_stay_within_the_page_and_lines_at_their_places():
    assert [charts.percent(share) for share in (0.5, 1.2, -1, 1 / 3)] == ["50%", "100%", "0%", "33.33%"]
    assert [charts.rounded_top(values) for values in ([], [0.4], [1.1, 3.2], [9.5], [17])] == [1, 1, 4, 12, 24]
    assert charts.height_of(0, 4) == charts.TOP + charts.HEIGHT and charts.height_of(4, 4) == charts.TOP
    looks = charts.drafter_looks(["vanilla", *"abcdefghi"])
    assert looks["vanilla"][0] == "g0" and looks["a"][0] == looks["i"][0] == "c0"
    assert len({dashes for name, (_, dashes) in looks.items() if name in "abcdefgh"}) == 8
    many = charts.drafter_looks(["vanilla", "transformers", *map(str, range(26))])
    assert len({many[str(index)] for index in range(26)}) == 26  # no two lines of a chart look alike


def test_betas_interval_is_that_of_ratios_of_sums_over_questions():
    found = evaluate({"vanilla": StubEngine(), "fast": StubEngine(2)}, StubOracle(), [benchmark()], render)
    own = [record for record in found.records if record.drafter == "fast"]
    # by question 9 tokens in 6 steps, 3 in 2, 3 in 2: always 1.5
    assert beta_interval(own, 0) == pytest.approx([1.5, 1.5])
    low, high = beta_interval([*own, *(r for r in found.records if r.drafter == "vanilla" and r.question == 1)], 0)
    assert 1 < low < 1.5 == pytest.approx(high)
    assert beta_interval([], 0) is None


SHOWN = {
    **{"tokens": 6, "shown_tokens": 6, "steps": 3, "lengths": [1, 3, 2], "text": "a<b>🙂\n"},
    **{"sources": {"ctc": 2, "ngram": 1, "base token": 3}, "nodes": [[0, 0], [4, 2], [2, 1]]},
}
FOUND = {
    **{"failures": [], "broken": [], "width": 390, "inner": 390, "overflowing": [], "tip": "2.50×"},
    **{"background": "rgb(255, 255, 255)", "samples": [SHOWN]},
}


def test_what_a_page_shows_is_compared_with_the_json(report):
    assert faults(FOUND, report, "light") == []
    wrong = {
        "tokens": 5,
        "steps": 4,
        "lengths": [1, 3, 3],
        "text": "a",
        "sources": {},
        "nodes": [[0, 0], [4, 1], [2, 1]],
    }
    for key, value in wrong.items():
        (fault,) = faults({**FOUND, "samples": [{**SHOWN, key: value}]}, report, "light")
        assert f"bench, fast: {key} is {SHOWN[key]!r} in report.json and {value!r} shown" == fault
    (fault,) = faults({**FOUND, "samples": []}, report_of(samples=()), "light")
    assert "has no answer with trees" in fault


@pytest.fixture(scope="module")
def browser():
    found = chromium()
    if found is None:
        pytest.skip("Chromium is not installed")
    return found


def test_in_a_browser_nothing_overflows_or_fails_and_the_counts_agree(tmp_path, browser):
    long = "a_drafter_with_a_name_that_is_longer_than_a_phone_is_wide_" * 2
    report = report_of((long, ODD[0]), samples=[{**SAMPLE, "drafter": long, "question": "word " * 90}])
    write_report(tmp_path, report)
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = browse(browser, tmp_path, source, 360, "dark", tmp_path / "shot.png")
    assert faults(found, report, "dark") == []
    assert (
        found["samples"][0]["nodes"] == [[0, 0], [4, 2], [2, 1]] and (tmp_path / "shot.png").read_bytes()[1:4] == b"PNG"
    )


def test_a_first_step_that_kept_drafts_is_no_mere_prefill(tmp_path, browser):
    steps = {"sources": [0, 1, -1, 0, -1, -1], "accept_lengths": [3, 2, 1], "trees": None}
    report = report_of(samples=[{**SAMPLE, **steps}, {**SAMPLE, "sources": [-1, 0, 0, -1, 0, -1]}])
    found = browse(browser, tmp_path, page(report), 390, "light", tmp_path / "shot.png")["samples"]
    assert found[0]["said"][0] == "Step 1 of 3: 2 drafted tokens accepted; its tree was not recorded."
    assert found[1]["said"][0] == "Step 1 of 3: the prefill, which gives one token."


def test_the_check_notices_what_is_wrong(tmp_path, browser):
    write_report(tmp_path, report_of())
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    spoilt = '<div style="width: 700px">wide</div><img src="none.png"><script>undefined.x</script>'
    source = source.replace("<main>", f"<main>{spoilt}").replace('data-count="steps">3', 'data-count="steps">4')
    found = browse(browser, tmp_path, source, 390, "light", tmp_path / "shot.png")
    wrong = "\n".join(faults(found, report_of(), "dark"))
    for part in ("the console says", "does not load", "wide in 390", "dark theme", "steps is 3 in report.json and 4"):
        assert part in wrong
    assert check.__doc__
