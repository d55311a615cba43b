"""Batches of rows of similar length."""

import signal
import subprocess
import sys

import pytest
import torch

from draft_heads.train.batches import RowBatches, TokenBatches


def lengths_of_conversations(rows=2000):
    normal = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    return (0.8 * normal + 5.5).exp().clamp(8, 2048).long()


def test_rows_of_one_length_share_a_batch():
    assert TokenBatches([8, 8, 16, 16, 16], 36, seed=0).sizes == [2, 2, 1]
    assert TokenBatches([2048] * 4, 4096, seed=0).sizes == [2, 2]


def test_every_epoch_has_every_row_once_in_batches_that_are_full():
    lengths = lengths_of_conversations()
    batches = TokenBatches(lengths.tolist(), 4096, seed=1, processes=4)
    assert len(batches) % 4 == 0
    epochs = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        rows = list(batches)
        epochs.append(rows)
        assert len(rows) == len(batches)
        assert sorted(row for batch in rows for row in batch) == list(range(2000))
        padded = [len(batch) * int(-(-lengths[batch].max() // 8) * 8) for batch in rows]
        assert max(padded) <= 4096
        assert int(lengths.sum()) / sum(padded) > 0.95
        tokens = torch.tensor([int(lengths[batch].sum()) for batch in rows]).view(-1, 4).float()
        assert float((tokens.mean(1) / tokens.max(1).values).mean()) > 0.98  # ranks wait little for each other
    assert sorted(map(sorted, epochs[0])) != sorted(map(sorted, epochs[1]))  # rows meet others
    assert list(batches) == epochs[1]


def test_processes_without_a_row_left_get_an_empty_batch():
    rows = list(TokenBatches([40, 80, 80, 80, 40], 96, seed=0, processes=4))
    assert sorted(map(len, rows)) == [1, 1, 1, 2]
    rows = list(TokenBatches([88, 40, 80, 80, 80], 88, seed=0, processes=4))
    assert sorted(map(len, rows)) == [0] * 3 + [1] * 5
    assert sorted(row for batch in rows for row in batch) == [0, 1, 2, 3, 4]
    assert sorted(map(len, TokenBatches([10, 10], 90, seed=0, processes=4))) == [0, 0, 1, 1]


@pytest.mark.parametrize("rows", [1, 4, 5, 7, 8, 53])
def test_a_step_of_two_processes_has_the_rows_of_a_batch_of_one(rows):
    one, two = RowBatches(rows, 4, seed=3), RowBatches(rows, 2, seed=3, processes=2)
    batches = list(two)
    assert len(batches) == len(two) == 2 * len(one)
    for whole, first, second in zip(one, batches[::2], batches[1::2], strict=True):
        assert first + second == whole and 0 <= len(second) - len(first) <= 1
    assert sorted(row for batch in batches for row in batch) == list(range(rows))
    if rows < 4:
        return  # without its last step, nothing
    whole_steps = RowBatches(rows, 2, seed=3, processes=2, drop_last=True)
    assert list(whole_steps) == batches[: 2 * (rows // 4)] and len(whole_steps) == 2 * (rows // 4)


def test_dropping_the_only_step_is_refused():
    assert len(RowBatches(8, 4, seed=0, processes=2, drop_last=True)) == 2
    with pytest.raises(ValueError, match="--dataloader_drop_last leaves no step: one takes 8 rows, and there are 7"):
        RowBatches(7, 4, seed=0, processes=2, drop_last=True)


def test_a_batch_must_hold_the_longest_row():
    with pytest.raises(ValueError, match="--tokens_per_batch must hold the longest row, 100 tokens; got 90"):
        TokenBatches([10, 100], 90, seed=0)


WORKER = """
import multiprocessing, os, signal, subprocess, sys, time
from draft_heads.train.batches import leave_signals_to_trainer

def work(ready):
    leave_signals_to_trainer(0)
    for error in (ConnectionResetError("hung up"), EOFError("hung up"), KeyError("told")):
        sys.excepthook(type(error), error, None)
    ready.set()
    time.sleep(60)

if __name__ == "__main__":
    start = multiprocessing.get_context(sys.argv[1])
    worker = start.Process(target=work, args=(ready := start.Event(),), daemon=True)
    worker.start()
    ready.wait(60)
    for number in (signal.SIGTERM, signal.SIGINT):
        subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    worker.join(0.2)
    assert worker.is_alive(), "a signal of another process ended it"
    worker.terminate()
    worker.join(10)
    print("ended with", worker.exitcode, flush=True)
    os._exit(0)  # multiprocessing would wait for one that lives
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="the system does not tell who sent a signal")
@pytest.mark.parametrize("method", ["fork", "forkserver"])  # the default since Python 3.14, whose server is the parent
def test_only_the_trainer_ends_a_worker_by_a_signal(tmp_path, method):
    (tmp_path / "worker.py").write_text(WORKER)
    done = subprocess.run([sys.executable, tmp_path / "worker.py", method], capture_output=True, text=True)
    assert done.stdout == "ended with 0\n", done.stderr
    assert "KeyError: 'told'" in done.stderr and "hung up" not in done.stderr
