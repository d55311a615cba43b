"""Train a CTC draft head.

    python train/ctc.py --target data/tiny_target --dataset runs/distilled --output_dir runs/ctc
    deepspeed train/ctc.py --target lmsys/vicuna-7b-v1.3 --dataset runs/distilled --output_dir runs/ctc \
        --deepspeed configs/deepspeed/zero2.json

The trained head ends up in RUN/head. The same command again resumes; `--help` lists every option.
"""

from draft_heads.train.command import train

if __name__ == "__main__":
    train("ctc")
