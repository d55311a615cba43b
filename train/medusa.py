"""Train a Medusa draft head.

    python train/medusa.py --target data/tiny_target --dataset runs/distilled --output_dir runs/medusa
    deepspeed train/medusa.py --target lmsys/vicuna-7b-v1.3 --dataset runs/distilled --output_dir runs/medusa \
        --deepspeed configs/deepspeed/zero2.json

The trained head ends up in RUN/head. The same command again resumes; `--help` lists every option.
"""

from __future__ import annotations

from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.medusa import MedusaHead
from draft_heads.inference.drafters.heads.medusa import draft_tree, rank_paths
from draft_heads.train.run import train_head
from draft_heads.train.simulate import ProposeAt


def propose_from(head: MedusaHead, rows: Rows, view: TargetView, max_nodes: int) -> ProposeAt:
    """How the Medusa drafter drafts along one row: K distributions from the hidden state at the anchor."""
    paths = rank_paths(head, max_nodes)
    states = head.target_states(rows.hidden[0], None if rows.aux_hidden is None else rows.aux_hidden[0])
    return lambda anchor: draft_tree(head, states[anchor], paths)


if __name__ == "__main__":
    train_head("medusa", propose_from)
