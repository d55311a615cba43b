"""One thread per test process, small tests first: the models are tiny and other processes may share the cores."""

import os
import resource

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)

LONGEST = ("ahead", "batch", "captured_steps", "lossless_matrix", "ouroboros", "resume", "training")


def pytest_collection_modifyitems(items):
    """The files that decode or train the most come last."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") in LONGEST)


def pytest_configure(config):
    """A test run that was killed while DeepSpeed compiled an operator left a lock that this one would wait for."""
    if not hasattr(config, "workerinput"):  # once, before the processes of pytest-xdist start
        from draft_heads.train.zero_config import build_locks

        for lock, builders in build_locks().items():
            if builders is None:
                lock.unlink()


@pytest.fixture
def no_larger_files():
    """No file of this process may pass 4,096 bytes: what a full disk does to writers, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
