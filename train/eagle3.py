"""Train an EAGLE-3 draft head.

    python train/eagle3.py --target data/tiny_target --dataset runs/distilled --output_dir runs/eagle3
    deepspeed train/eagle3.py --target meta-llama/Llama-3.1-8B-Instruct --dataset runs/distilled \
        --output_dir runs/eagle3 --deepspeed configs/deepspeed/zero2.json

The trained head ends up in RUN/head. The same command again resumes; `--help` lists every option.
"""

from draft_heads.train.command import train

if __name__ == "__main__":
    train("eagle3")
