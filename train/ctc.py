"""Train a CTC draft head.

    python train/ctc.py --target data/tiny_target --dataset runs/distilled --output_dir runs/ctc
    deepspeed train/ctc.py --target lmsys/vicuna-7b-v1.3 --dataset runs/distilled --output_dir runs/ctc \
        --deepspeed configs/deepspeed/zero2.json

The trained head ends up in RUN/head. The same command again resumes; `--help` lists every option.
"""

from __future__ import annotations

import torch

from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.ctc import CTCHead
from draft_heads.inference.drafters.heads.ctc import draft_tree
from draft_heads.train.run import train_head
from draft_heads.train.simulate import ProposeAt


def propose_from(head: CTCHead, rows: Rows, view: TargetView, max_nodes: int) -> ProposeAt:
    """How the CTC drafter drafts along one row: the head's frames at every anchor, the decoder's own tree."""
    anchors = torch.arange(rows.input_ids.shape[1], device=rows.hidden.device)[None]
    view = head.draft_view(view)
    frames = head.drafted_frames(rows, anchors, view)[0]
    return lambda anchor: draft_tree(head, view, frames[anchor], max_nodes)


if __name__ == "__main__":
    train_head("ctc", propose_from)
