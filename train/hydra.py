"""Train a Hydra draft head.

    python train/hydra.py --target data/tiny_target --dataset runs/distilled --output_dir runs/hydra
    deepspeed train/hydra.py --target lmsys/vicuna-7b-v1.3 --dataset runs/distilled --output_dir runs/hydra \
        --deepspeed configs/deepspeed/zero2.json

The trained head ends up in RUN/head. The same command again resumes; `--help` lists every option.
"""

from __future__ import annotations

from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.hydra import HydraHead
from draft_heads.inference.drafters.heads.hydra import draft_tree
from draft_heads.train.run import train_head
from draft_heads.train.simulate import ProposeAt


def propose_from(head: HydraHead, rows: Rows, view: TargetView, max_nodes: int) -> ProposeAt:
    """How the Hydra drafter drafts along one row: level by level behind the state and base token at the anchor."""
    states, text = head.row_states(rows)[0], rows.input_ids[0]
    return lambda anchor: draft_tree(head, view, states[anchor], text[anchor + 1], max_nodes)


if __name__ == "__main__":
    train_head("hydra", propose_from)
