"""Look at a report.html in a real browser: screenshots, and what a page must keep to.

    python scripts/checks/report_page.py runs/quickstart/report --output runs/report_page

Needs Chromium (`apt-get install chromium`). Takes screenshots at phone and desktop width, light and dark, and checks in
each: no error on the console, nothing wider than the page, every image loads, charts show values on hover, the token
view's counts are those of report.json, and a selected step shows its tree with its accepted nodes. Exits with 1 if
anything fails, also where a report has no answers with trees to look at.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

from draft_heads.inference.evaluation.html.answers import source_counts
from draft_heads.scripts.decoding_options import script_parser

WIDTHS = (360, 390, 1280)
THEMES = {"light": 1, "dark": 0}  # values of Blink's preferredColorScheme
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    "--enable-logging=stderr",
)
ERRORS = """<script>
window.failures = [];
addEventListener("error", (event) => failures.push(event.message || "a resource did not load"), true);
console.error = (...words) => failures.push(words.join(" "));
</script>"""
PROBE = """
<body style="margin: 0; background: #888">
<iframe style="border: 0; width: WIDTHpx; height: 900px; display: block"></iframe>
<pre id="found" hidden></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const inside = frame.contentWindow, page = inside.document, all = (query) => [...page.querySelectorAll(query)];
  const text = (element) => element ? element.textContent : null;
  const overflowing = all("body *").filter((one) => !one.closest(".scroll, .question, details:not([open]), [hidden]")
    && one.getBoundingClientRect().right > inside.innerWidth + 1);
  const samples = all("article.sample").map((article) => ({
    tokens: Number(text(article.querySelector("[data-count=tokens]"))),
    steps: Number(text(article.querySelector("[data-count=steps]"))),
    shown_tokens: article.querySelectorAll(".token").length,
    lengths: [...article.querySelectorAll(".step")].map((step) => step.querySelectorAll(".token").length),
    text: text(article.querySelector(".answer")),
    sources: Object.fromEntries([...article.querySelectorAll("[data-source]")]
      .map((one) => [one.dataset.source, Number(text(one))])),
    nodes: [...article.querySelectorAll(".step")].map((step) => {
      step.click();
      return [".tree rect.node", ".tree rect.node.accepted"].map((node) => article.querySelectorAll(node).length);
    }),
    said: [...article.querySelectorAll(".step")].map((step) => {
      step.click();
      return text(article.querySelector(".tree p"));
    }),
  }));
  page.querySelector("[data-tip]").dispatchEvent(new inside.PointerEvent("pointermove", { bubbles: true }));
  document.getElementById("found").textContent = JSON.stringify({
    failures: inside.failures, width: page.documentElement.scrollWidth, inner: inside.innerWidth,
    overflowing: overflowing.slice(0, 5).map((one) => one.outerHTML.slice(0, 120)),
    broken: [...page.images].filter((image) => !image.complete || !image.naturalWidth).map((image) => image.src),
    background: inside.getComputedStyle(page.body).backgroundColor, samples,
    tip: page.getElementById("tip").hidden ? "" : text(page.getElementById("tip")),
  });
  for (const article of all("article.sample")) article.querySelectorAll(".step")[SHOWN]?.click();
  page.activeElement.blur();
  page.getElementById("tip").hidden = true;
  frame.style.height = `${page.documentElement.scrollHeight}px`;
};
frame.srcdoc = PAGE;
</script>
"""


def chromium() -> str | None:
    """The path of an installed Chromium."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def browse(browser: str, folder: Path, source: str, width: int, theme: str, picture: Path) -> dict[str, Any]:
    """What a browser finds in a page of a width and theme; its screenshot goes to `picture`.

    The page is shown in a frame of that width, because a window of Chromium is at least 500 pixels wide.
    """
    page = json.dumps(source.replace("<head>", f"<head>{ERRORS}", 1)).replace("<", "\\u003c")
    probe = folder / "probe.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("SHOWN", "3").replace("PAGE", page), encoding="utf-8")
    flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={THEMES[theme]}"]
    flags += ["--virtual-time-budget=4000", f"--window-size={max(width, 500)},1000"]
    done = subprocess.run([browser, *flags, "--dump-dom", probe.as_uri()], capture_output=True, text=True, timeout=300)
    match = re.search(r'<pre id="found"[^>]*>(.*?)</pre>', done.stdout, re.DOTALL)
    if match is None or not match.group(1):
        raise ValueError(f"{browser} gave no page of {width} pixels; it says: {done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(html.unescape(match.group(1)))
    height = re.search(r"height: ([\d.]+)px; display", done.stdout)
    size = f"--window-size={max(width, 500)},{int(float(height.group(1))) if height else 4000}"
    shot = [*flags[:-1], size, f"--screenshot={picture}", probe.as_uri()]
    subprocess.run([browser, *shot], capture_output=True, check=True, timeout=300)
    console = re.findall(r"CONSOLE.*?\] \"(.*?)\", source", done.stderr)
    return found | {"failures": [*found["failures"], *console]}


def faults(found: dict[str, Any], report: dict[str, Any], theme: str) -> list[str]:
    """What a page does not keep to."""
    wrong = [f"the console says {message}" for message in found["failures"]]
    wrong += [f"image {source[:80]} does not load" for source in found["broken"]]
    if found["width"] > found["inner"] or found["overflowing"]:
        wrong.append(f"the page is {found['width']} wide in {found['inner']}: {found['overflowing']}")
    if not found["tip"]:
        wrong.append("a mark of a chart does not show its value on hover")
    brightness = sum(map(int, re.findall(r"\d+", found["background"])[:3])) / 3
    if (brightness > 127) != (theme == "light"):
        wrong.append(f"the {theme} theme has the background {found['background']}")
    samples = report.get("samples") or []
    if not any(sample["trees"] for sample in samples):
        wrong.append(
            "report.json has no answer with trees, which are then not looked at; evaluate without --replay of answers"
        )
    if len(samples) != len(found["samples"]):
        wrong.append(f"report.json has {len(samples)} samples and the page {len(found['samples'])}")
    for sample, shown in zip(samples, found["samples"]):
        trees = sample["trees"] or [None] * len(sample["accept_lengths"])
        drafted = [
            [1 + len(tree["parents"]), len(tree["accepted"])] if tree and tree["parents"] else [0, 0] for tree in trees
        ]
        expected = {
            "tokens": len(sample["texts"]),
            "shown_tokens": len(sample["texts"]),
            "steps": len(sample["accept_lengths"]),
            "lengths": sample["accept_lengths"],
            "text": "".join(sample["texts"]),
            "sources": source_counts(sample),
            "nodes": drafted,
        }
        wrong += [
            f"{sample['benchmark']}, {sample['drafter']}: {key} is {value!r} in report.json and {shown[key]!r} shown"
            for key, value in expected.items()
            if shown[key] != value
        ]
    return wrong


def check(browser: str, report: Path, output: Path) -> list[str]:
    """All faults of `report`/report.html, each with the width and theme; screenshots go to `output`."""
    source = (report / "report.html").read_text(encoding="utf-8")
    content = json.loads((report / "report.json").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    wrong = []
    for width in WIDTHS:
        for theme in THEMES:
            with tempfile.TemporaryDirectory() as folder:
                picture = output.resolve() / f"{width}-{theme}.png"
                found = browse(browser, Path(folder), source, width, theme, picture)
            wrong += [f"{width} px, {theme}: {fault}" for fault in faults(found, content, theme)]
    return wrong


def main() -> int:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("report", type=Path, help="a folder with report.html and report.json")
    parser.add_argument("--output", type=Path, default=Path("runs/report_page"), help="folder for the screenshots")
    args = parser.parse_args()
    browser = chromium()
    if browser is None:
        raise ValueError("a page is checked in Chromium; none is installed; apt-get install chromium")
    for name in ("report.html", "report.json"):
        if not (args.report / name).is_file():
            raise ValueError(f"a report's folder has {name}; {args.report} has none; name another")
    wrong = check(browser, args.report, args.output)
    print("\n".join([*wrong, f"{len(wrong)} faults; screenshots are in {args.output}"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
