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
AHEAD = "tests/inference/test_ahead.py"
BATCH = "tests/inference/test_batch.py"
FUSED = "tests/inference/test_fused_decoder.py"
MASKS = "tests/inference/test_masks.py"
TREE = "tests/inference/test_tree.py"
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
        "self.target.forward_tree(rows, depth, sees, cache)",
        "self.target.forward_tree(rows, torch.arange(len(rows), device=rows.device), sees, cache)",
        ENGINE,
    ),
    Defect(
        "a blank left in a candidate",
        "inference/ctc_search.py",
        "return [c for c in merged if c != blank]",
        "return merged",
        SEARCH,
    ),
    Defect(
        "a sibling drafted twice",
        "inference/ctc_search.py",
        "node = node_of.get((parent, token))",
        "node = None",
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
        "source = self.lengths[:, None] + rows",
        "source = self.lengths[:, None] + rows - 1",
        ENGINE,
    ),
    Defect(
        "compaction of keys only",
        "inference/kv_cache.py",
        "self.rows.index_copy_(2, into[0], self.rows.index_select(2, source[0]))",
        "keys = self.rows[:, : self.rows.shape[1] // 2]\n"
        "            keys.index_copy_(2, into[0], keys.index_select(2, source[0]))",
        ENGINE,
    ),
    Defect(
        "rows see all rows before them",
        "inference/masks.py",
        "seen = sees.gather(2,",
        "seen = torch.ones_like(sees).tril().gather(2,",
        ENGINE,
    ),
    Defect(
        "the committed text masked by one row",
        "inference/masks.py",
        "visible = (index < start)[:, None]",
        "visible = (index < start - 1)[:, None]",
        ENGINE,
    ),
    Defect(
        "the first row behind a forward seen by its last",
        "inference/masks.py",
        "(index < start + rows)",
        "(index <= start + rows)",
        ENGINE,
    ),
    Defect(
        "a sliding window ignored",
        "inference/masks.py",
        "visible & (key_positions[:, None] > query_positions[:, :, None] - window)",
        "visible",
        f"{MATRIX} -k mistral-float64",
    ),
    Defect(
        "a sliding window one too wide",
        "inference/masks.py",
        "(key_positions[:, None] > query_positions",
        "(key_positions[:, None] >= query_positions",
        f"{MATRIX} -k mistral-float64",
    ),
    Defect(
        "a sliding window measured by rows, not by positions",
        "inference/masks.py",
        "positions.gather(1, row), index)",
        "index, index)",
        MASKS,
    ),
    Defect(
        "a node accepted behind a refused parent",
        "inference/verify.py",
        "    accepted = ~(sees & ~agrees[None, :]).any(-1)\n    depth = torch.where(accepted, sees.sum(-1), 0)\n"
        "    last = depth.argmax(keepdim=True)",
        "    accepted = agrees\n    depth = torch.where(accepted, sees.sum(-1), 0)\n"
        "    last = depth.argmax(keepdim=True)",
        TREE,
    ),
    Defect(
        "rows that only ride along accepted",
        "inference/verify.py",
        "agrees = (tree.tokens == choices[tree.parents + 1]) & tree.candidate",
        "agrees = tree.tokens == choices[tree.parents + 1]",
        TREE,
    ),
    Defect(
        "padding that may be accepted",
        "inference/tree.py",
        "torch.cat([self.candidate, ends.bool()])",
        "torch.cat([self.candidate, ~ends.bool()])",
        TREE,
    ),
    Defect(
        "deep rows that do not see the base token",
        "inference/tree.py",
        "range(max(levels, 1).bit_length())",
        "range(max(levels, 1).bit_length() - 1)",
        TREE,
    ),
    Defect(
        "refused rows behind the accepted ones",
        "inference/verify.py",
        "place = torch.where(on_path, depth, most + 1)",
        "place = torch.where(on_path, depth, most)",
        TREE,
    ),
    Defect(
        "a path committed with what fills it up",
        "inference/kv_cache.py",
        "self.rows.gather(2, index(source)))\n        self.lengths += counts",
        "self.rows.gather(2, index(source)))\n        self.lengths += rows.shape[1]",
        ENGINE,
    ),
    Defect(
        "the last accepted token followed by itself",
        "inference/engine.py",
        "behind = torch.arange(len(path), device=path.device) >= count - 1",
        "behind = torch.arange(len(path), device=path.device) >= count",
        ENGINE,
    ),
    Defect(
        "the host told what was committed, not what follows",
        "inference/engine.py",
        "torch.cat([count[None], next_tokens])",
        "torch.cat([count[None], tokens])",
        ENGINE,
    ),
    Defect(
        "the host told what fills a path up",
        "inference/engine.py",
        "return tokens[:count]",
        "return tokens",
        ENGINE,
    ),
    Defect(
        "no room for steps the host has not read",
        "inference/engine.py",
        "cache.settle(committed + len(flying) * (self.drafter.max_depth + 1))",
        "cache.settle(committed)",
        f"{AHEAD} -k in_flight",
    ),
    Defect(
        "no room for what fills a path up",
        "inference/engine.py",
        "cache.reach(1 + max(len(tree), self.drafter.max_depth))",
        "cache.reach(1 + len(tree))",
        f"{ENGINE} -k smaller",
    ),
    Defect(
        "trees of any size in steps that run ahead",
        "inference/engine.py",
        "return tree.padded(padded_nodes(self.drafter.max_nodes)) if self.ahead else tree",
        "return tree",
        f"{AHEAD} -k asks",
    ),
    Defect(
        "tokens told to the host overwritten by the next step's",
        "inference/engine.py",
        "self._host = torch.empty(told.shape, dtype=told.dtype, pin_memory=told.is_cuda)\n"
        "        self._host.copy_(told, non_blocking=True)",
        "self._host = told",
        f"{AHEAD} -k captured",
    ),
    Defect(
        "a captured step that goes on from an old one",
        "inference/captured.py",
        "elif step is not self._step:",
        "elif False:",
        f"{AHEAD} -k captured",
    ),
    Defect(
        "a captured greedy step replayed where tokens are drawn",
        "inference/engine.py",
        "step.tree is None or settings.sampling is not None:",
        "step.tree is None:",
        f"{AHEAD} -k captured",
    ),
    Defect(
        "a captured step replayed in memory that has moved",
        "inference/captured.py",
        "if places != self._places:",
        "if self._places is None:",
        f"{AHEAD} -k anew",
    ),
    Defect(
        "text and tree weighed without their sum",
        "inference/tree_attention.py",
        "torch.logaddexp(text_lse, tree_lse)",
        "torch.maximum(text_lse, tree_lse)",
        FUSED,
    ),
    Defect(
        "layers on several devices compacted on the first alone",
        "inference/kv_cache.py",
        "for store in self.stores:\n            kept",
        "for store in self.stores[:1]:\n            kept",
        f"{AHEAD} -k several",
    ),
    Defect(
        "typical acceptance left out",
        "inference/engine.py",
        "on_path, next_base = typical.path(tree, logits, sees)",
        "on_path, next_base = greedy_path(tree, chosen, sees)",
        f"{SAMPLING} -k typical",
    ),
    Defect(
        "a prompt behind the last prompt's text",
        "inference/engine.py",
        "self._cache.clear()",
        "pass",
        ENGINE,
    ),
    Defect(
        "a batch compacted by other sequences' rows",
        "inference/kv_cache.py",
        "slots.repeat_interleave(lanes // len(rows), 0)",
        "slots.repeat(lanes // len(rows), 1)",
        BATCH,
    ),
    Defect(
        "a batch with room for its shortest text",
        "inference/batch.py",
        "cache.settle(max(",
        "cache.settle(min(",
        BATCH,
    ),
    Defect(
        "a batch's noise one position early",
        "inference/batch.py",
        "positions = depth + cache.lengths[:, None] + 1",
        "positions = depth + cache.lengths[:, None]",
        BATCH,
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
        "VerifiedStep(tokens, next_tokens, hidden[path], count, chosen, tree)",
        "VerifiedStep(tokens, next_tokens, hidden[: len(path)], count, chosen, tree)",
        ENGINE,
    ),
    Defect(
        "noise keyed by step",
        "inference/engine.py",
        "chosen = choices(logits, depth + cache.lengths + 1, sampling)",
        "chosen = choices(logits, depth + 1, sampling)",
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
        "base_position = self.length.expand(1, 1)",
        "base_position = (self.length + 1).expand(1, 1)",
        ENGINE,
    ),
    Defect(
        "context states counted with what fills a path up",
        "inference/drafters/ctc.py",
        "self.length += step.count",
        "self.length += len(hidden)",
        ENGINE,
    ),
    Defect(
        "context states of the last prompt kept",
        "inference/drafters/ctc.py",
        "self.length.zero_()",
        "pass",
        ENGINE,
    ),
    Defect(
        "a chain that sees the state it opens with twice",
        "inference/drafters/ctc.py",
        "self._cache[0].index() < self.length - 1",
        "self._cache[0].index() < self.length",
        ENGINE,
    ),
    Defect(
        "frames that see the first of them only",
        "inference/drafters/block_cache.py",
        "(slots[:, None] if causal else slots[-1])",
        "(slots[:, None] if causal else slots[0])",
        ENGINE,
    ),
    Defect(
        "drafted nodes that see their siblings' ancestors",
        "heads/attention.py",
        "inherited = self.sees[self.level][parents]",
        "inherited = torch.ones_like(self.sees[self.level][parents])",
        ENGINE,
    ),
    Defect(
        "a drafted node that sees what lies behind the drafts",
        "heads/attention.py",
        "self.sees[self.level][:, drafted] & (index < self.length + end)",
        "self.sees[self.level][:, drafted]",
        ENGINE,
    ),
    Defect(
        "a level of drafts one too narrow",
        "inference/level_tree.py",
        "width = max_nodes - level + 1",
        "width = max_nodes - level",
        LEVELS,
    ),
    Defect(
        "a level of prefixes one too narrow",
        "inference/ctc_search.py",
        "width = min(max_nodes - depth, level.numel())",
        "width = min(max_nodes - depth - 1, level.numel())",
        SEARCH,
    ),
    Defect(
        "drafts hung under parents of another level",
        "inference/level_tree.py",
        "parents.append(rows[parent])",
        "parents.append(parent)",
        LEVELS,
    ),
    Defect(
        "k-grams of another path",
        "inference/drafters/chimera.py",
        "grams = torch.cat([grams[parents], tokens[:, None]], dim=1)",
        "grams = torch.cat([grams[:1].expand(len(tokens), -1), tokens[:, None]], dim=1)",
        ENGINE,
    ),
    Defect(
        "k-grams of what fills a path up",
        "inference/drafters/chimera.py",
        "text[step.count + torch.arange(",
        "text[len(step.tokens) + torch.arange(",
        ENGINE,
    ),
    Defect(
        "Hydra's state of what fills a path up",
        "inference/drafters/hydra.py",
        "self._state = hidden.index_select(0, step.count[None] - 1)[0]",
        "self._state = hidden[-1]",
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
