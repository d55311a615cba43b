"""Who may read values on the host, and the few sizes of trees where nobody may."""

import torch

from draft_heads.inference.target.host_sync import host_sync_allowed, no_host_sync
from draft_heads.inference.tree import padded_nodes


def test_sizes_of_trees_are_few():
    assert [padded_nodes(nodes) for nodes in (0, 1, 8, 9, 32, 33, 64, 65)] == [0, 8, 8, 16, 32, 64, 64, 128]


def test_a_cpu_may_be_asked_unless_it_may_not():
    device = torch.device("cpu")
    assert host_sync_allowed(device) and not host_sync_allowed(torch.device("meta"))
    with no_host_sync():
        assert not host_sync_allowed(device)
    assert host_sync_allowed(device)
