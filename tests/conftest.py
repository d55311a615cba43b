"""One thread per test process, small tests first: the models are tiny and other processes may share the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)

LONGEST = ("test_ahead", "test_batch", "test_lossless_matrix", "test_ouroboros", "test_resume", "test_training")


def pytest_collection_modifyitems(items):
    """The files that decode or train the most come last."""
    items.sort(key=lambda item: item.path.stem in LONGEST)
