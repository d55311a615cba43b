"""Train a Chimera draft head.

    python train/chimera.py --target data/tiny_target --dataset runs/distilled --output_dir runs/chimera
    deepspeed train/chimera.py --target lmsys/vicuna-7b-v1.3 --dataset runs/distilled --output_dir runs/chimera \
        --deepspeed configs/deepspeed/zero2.json

The trained head ends up in RUN/head. The same command again resumes; `--help` lists every option.
"""

from __future__ import annotations

from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.chimera import ChimeraHead
from draft_heads.inference.drafters.heads.chimera import draft_tree, row_contexts
from draft_heads.train.run import train_head
from draft_heads.train.simulate import ProposeAt


def propose_from(head: ChimeraHead, rows: Rows, view: TargetView, max_nodes: int) -> ProposeAt:
    """How the Chimera drafter drafts along one row: level by level, over the keys and values up to the anchor."""
    text, view = rows.input_ids[0], head.draft_view(view)
    context = row_contexts(head, rows, view, max_nodes * head.config.heads + 1)
    return lambda anchor: draft_tree(head, view, context(anchor), text[anchor + 1], max_nodes)


if __name__ == "__main__":
    train_head("chimera", propose_from)
