"""Train a CTC draft head.

    python train/ctc.py --target data/tiny_target --dataset runs/distilled --output_dir runs/ctc
    deepspeed train/ctc.py --target lmsys/vicuna-7b-v1.3 --dataset runs/distilled --output_dir runs/ctc \
        --deepspeed configs/deepspeed/zero2.json

The trained head ends up in RUN/head. The same command again resumes; `--help` lists every option.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from heads.base import TargetView
from heads.ctc import CTCConfig, CTCHead
from inference.ctc_search import build_tree
from train.options import parse_options
from train.run import begin, export, fit, head_config, load_data, load_target, prepare_folder
from train.simulate import ProposeAt
from train.trainer import DraftHeadTrainer


def drafts_along(nodes: int) -> Any:
    """How the CTC drafter drafts along a held-out row: the head's frames at every anchor, the decoder's own tree."""

    def propose_from(head: CTCHead, hidden: Tensor, batch: dict[str, Tensor], view: TargetView) -> ProposeAt:
        anchors = torch.arange(batch["input_ids"].shape[1], device=hidden.device)[None]
        frames = head.drafted_frames(
            hidden, batch["input_ids"], batch["segment_ids"], batch["position_ids"], anchors, view
        )
        return lambda anchor: build_tree(head.frame_log_probs(frames[0, anchor], view), nodes)

    return propose_from


def main() -> None:
    run, settings, args = parse_options(CTCConfig)
    try:
        begin(run, args)
        resume = prepare_folder(run, settings, args)
        target = load_target(run, args)
        training, held_out, data, collator = load_data(run, target)
        config = head_config(CTCConfig, settings, run, target, data)
        assert isinstance(config, CTCConfig)
    except (ValueError, OSError) as error:
        sys.exit(f"train/ctc.py: {error}")

    head = CTCHead(config)
    sample = collator([training[row] for row in range(min(8, len(training)))])
    sample = {name: value.to(target.device) for name, value in sample.items()}
    trainer = DraftHeadTrainer(
        head,
        target,
        args,
        collator,
        training,
        held_out,
        simulate_dataset=held_out.select(range(min(run.simulate_rows, len(held_out)))),
        propose_from=drafts_along(run.simulate_nodes),
    )
    head.to(target.device).calibrate(trainer.hidden_states(sample)[sample["mask"]], trainer.view)
    fit(trainer, resume)
    print(f"head: {export(trainer, run, settings, data)}", flush=True)


if __name__ == "__main__":
    main()
