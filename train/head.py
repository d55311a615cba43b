"""Train any draft head by its name; heads that papers describe have an entry point of their own beside this one.

    python train/head.py --head medusa --target data/tiny_target --dataset runs/distilled --output_dir runs/medusa

With `deepspeed` in place of `python`, several GPUs. `--head NAME --help` lists the options of that head.
"""

from draft_heads.train.command import train_named_head

if __name__ == "__main__":
    train_named_head()
