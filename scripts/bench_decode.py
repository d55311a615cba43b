"""Decoding benchmarks under their documented path; see `scripts/bench/decode.py`."""

from draft_heads.scripts.bench.decode import exit_status, run

if __name__ == "__main__":
    raise SystemExit(exit_status(run))
