"""Training benchmarks under their documented path; see `scripts/bench/train.py`."""

from draft_heads.scripts.bench.train import exit_status, run

if __name__ == "__main__":
    raise SystemExit(exit_status(run))
