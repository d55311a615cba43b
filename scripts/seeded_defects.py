"""Plant known defects, one at a time, and see which the tests catch.

    python scripts/seeded_defects.py [--jobs 2] [--only NAME …]

Each defect is one edit of one file in a copy of the project, and names the tests that must fail. Prints killed/total;
the exit status is 0 only when every defect is caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "tests/inference/test_engine.py"
SAMPLING = "tests/inference/test_sampling.py"
MATRIX = "tests/inference/test_lossless_matrix.py"
SEARCH = "tests/inference/test_ctc_search.py"
LEVELS = "tests/inference/test_level_tree.py"
FUSED = "tests/inference/test_fused_decoder.py"
HEADS = "tests/heads/test_draft_heads.py"


@dataclass(frozen=True)
class Defect:
    """One edit: `right` stands once in `file` and becomes `wrong`; `tests` (pytest arguments) must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


DEFECTS = (
    Defect(
        "position by row, not by depth",
        "inference/engine.py",
        "depth = depths(sees)",
        "depth = torch.arange(len(sees), device=rows.device)",
        f"{MATRIX} -k llama-float64",
    ),
    Defect(
        "a blank left in a candidate",
        "inference/ctc_search.py",
        "return [c for c in merged if c != blank]",
        "return merged",
        SEARCH,
    ),
    Defect(
        "blanks dropped before repeats are merged",
        "inference/ctc_search.py",
        "merged = [c for i, c in enumerate(alignment) if i == 0 or c != alignment[i - 1]]",
        "alignment = [c for c in alignment if c != blank]\n"
        "    merged = [c for i, c in enumerate(alignment) if i == 0 or c != alignment[i - 1]]",
        SEARCH,
    ),
    Defect(
        "a repeated label without a blank between",
        "heads/prefix_scores.py",
        "return torch.where(labels == state.last[:, None], scores - over_frames(state.in_label), scores).clamp_(min=0)",
        "return scores",
        "tests/heads/test_prefix_scores.py",
    ),
    Defect(
        "compaction off by one",
        "inference/kv_cache.py",
        "self.store[..., self.length : end, :] = self.store[..., rows + self.length, :]",
        "self.store[..., self.length : end, :] = self.store[..., rows + self.length - 1, :]",
        ENGINE,
    ),
    Defect(
        "compaction of keys only",
        "inference/kv_cache.py",
        "self.store[..., self.length : end, :] = self.store[..., rows + self.length, :]",
        "self.store[:, 0, ..., self.length : end, :] = self.store[:, 0, ..., rows + self.length, :]",
        ENGINE,
    ),
    Defect(
        "rows see all rows before them",
        "inference/target.py",
        "visible = torch.cat([sees.new_ones(len(sees), committed), sees], dim=1)",
        "visible = torch.cat([sees.new_ones(len(sees), committed), torch.ones_like(sees).tril()], dim=1)",
        FUSED,
    ),
    Defect(
        "the committed text masked by one row",
        "inference/fused_decoder.py",
        "visible = (index < lengths)[:, None] | (in_tree[:, None] & seen)",
        "visible = (index < lengths - 1)[:, None] | (in_tree[:, None] & seen)",
        f"{FUSED} -k compiled",
    ),
    Defect(
        "a sliding window ignored",
        "inference/target.py",
        'windowed = {"sliding_attention": visible & near}',
        'windowed = {"sliding_attention": visible}',
        f"{MATRIX} -k mistral-float64",
    ),
    Defect(
        "a sliding window one too wide",
        "inference/target.py",
        "near = key_positions[:, None, :] > query_positions[:, :, None] - self.window",
        "near = key_positions[:, None, :] >= query_positions[:, :, None] - self.window",
        f"{MATRIX} -k mistral-float64",
    ),
    Defect(
        "a node accepted behind a refused parent",
        "inference/verify.py",
        "    accepted = ~(sees & ~agrees[None, :]).any(-1)\n    depth = torch.where(accepted, sees.sum(-1), 0)\n"
        "    last = depth.argmax()",
        "    accepted = agrees\n    depth = torch.where(accepted, sees.sum(-1), 0)\n    last = depth.argmax()",
        "tests/inference/test_tree.py",
    ),
    Defect(
        "rows that only ride along accepted",
        "inference/verify.py",
        "agrees = (tree.tokens == choices[tree.parents + 1]) & tree.candidate",
        "agrees = tree.tokens == choices[tree.parents + 1]",
        "tests/inference/test_tree.py",
    ),
    Defect(
        "EOS looked for at the end of a step only",
        "inference/engine.py",
        "if token in settings.eos_token_ids:",
        "if count == len(new) and token in settings.eos_token_ids:",
        ENGINE,
    ),
    Defect(
        "one token too many",
        "inference/engine.py",
        "if total == self.limit:",
        "if total > self.limit:",
        ENGINE,
    ),
    Defect(
        "hidden states of refused drafts kept",
        "inference/engine.py",
        "VerifiedStep(rows[kept], hidden[kept], next_base, chosen, tree)",
        "VerifiedStep(rows[kept], hidden[: len(kept)], next_base, chosen, tree)",
        ENGINE,
    ),
    Defect(
        "noise keyed by step",
        "inference/engine.py",
        "chosen = choices(logits, depth + cache.length + 1, settings)",
        "chosen = choices(logits, depth + 1, settings)",
        SAMPLING,
    ),
    Defect(
        "noise of a position shared by all tokens",
        "inference/sampling.py",
        "mixed = _scrambled(row[:, None] + columns * _GOLDEN)",
        "mixed = _scrambled(row[:, None] + columns * 0)",
        SAMPLING,
    ),
    Defect(
        "top-p one token short",
        "inference/sampling.py",
        "below = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p",
        "below = ascending.softmax(-1).cumsum(-1).roll(-1, -1) <= 1 - self.top_p",
        SAMPLING,
    ),
    Defect(
        "typical acceptance without its floor",
        "inference/verify.py",
        ".clamp(max=self.epsilon)  # e^(−H)",
        ".clamp(min=self.epsilon)  # e^(−H)",
        SAMPLING,
    ),
    Defect(
        "frames drafted from a stale state",
        "inference/drafters/ctc.py",
        "self._state = states[0, -1]",
        "self._state = states[0, 0]",
        ENGINE,
    ),
    Defect(
        "frames one position late",
        "inference/drafters/ctc.py",
        "base_position = torch.full((1, 1), self.length, device=self._state.device)",
        "base_position = torch.full((1, 1), self.length + 1, device=self._state.device)",
        ENGINE,
    ),
    Defect(
        "drafted nodes that see their siblings' ancestors",
        "heads/attention.py",
        "sees[before:, :before] = self.sees[self.level][parents]",
        "sees[before:, :before] = True",
        ENGINE,
    ),
    Defect(
        "k-grams of another path",
        "inference/drafters/chimera.py",
        "grams = torch.cat([grams[parents], tokens[:, None]], dim=1)",
        "grams = torch.cat([grams[:1].expand(len(tokens), -1), tokens[:, None]], dim=1)",
        ENGINE,
    ),
    Defect(
        "Hydra's tokens of another path",
        "inference/drafters/hydra.py",
        "paths = torch.cat([paths[parents], head.token_states(tokens, view)[:, None]], dim=1)",
        "paths = torch.cat([paths[:1].expand(len(tokens), -1, -1), head.token_states(tokens, view)[:, None]], dim=1)",
        ENGINE,
    ),
    Defect(
        "a k-gram table that forgets to forget",
        "inference/drafters/chimera.py",
        "return encode(grams) if cache is None else cache.lookup(grams, encode)",
        "return encode(grams) if cache is None else cache.lookup(grams.sort(-1).values, encode)",
        f"{ENGINE} {LEVELS}",
    ),
    Defect(
        "frames that see one context too many",
        "heads/attention.py",
        "in_context = (context <= anchor) &",
        "in_context = (context <= anchor + 1) &",
        HEADS,
    ),
    Defect(
        "Chimera's queries that see the token they draft",
        "heads/attention.py",
        "last = torch.where(key < length, anchor, anchor + 1 + query % heads)",
        "last = torch.where(key < length, anchor, anchor + 2 + query % heads)",
        f"{HEADS} tests/heads/test_chimera.py",
    ),
    Defect(
        "packed conversations that see each other",
        "heads/attention.py",
        "return (index <= last) & (segment_ids[b, index] == segment_ids[b, anchor])",
        "return index <= last",
        HEADS,
    ),
    Defect(
        "labels behind a disagreement",
        "heads/windows.py",
        "alive = alive & (text == label)",
        "pass",
        "tests/heads/test_windows.py",
    ),
)


def kills(defect: Defect) -> bool:
    """Whether the defect's tests fail in a copy of the project that has it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache", "__pycache__"))
        path = copy / defect.file
        path.write_text(path.read_text(encoding="utf-8").replace(defect.right, defect.wrong), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *defect.tests.split(maxsplit=9),
        ]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run for {defect.name!r}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="defects tested at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these defects only")
    args = parser.parse_args()
    unknown = sorted(set(args.only or ()) - {defect.name for defect in DEFECTS})
    if unknown:
        sys.exit(f"--only takes names of defects; there is no {', '.join(unknown)}")
    chosen = [defect for defect in DEFECTS if args.only is None or defect.name in args.only]
    table = Table("defect", "file", "caught")
    killed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for defect, caught in zip(chosen, pool.map(kills, chosen)):
            killed += caught
            table.add_row(defect.name, defect.file, "yes" if caught else "[red]NO")
    Console().print(table)
    print(f"{killed}/{len(chosen)} killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
