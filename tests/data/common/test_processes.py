"""What the processes of a launcher tell each other, played by a list of what they would say."""

import json
import threading

import pytest
import torch
import torch.distributed as dist

from draft_heads.data.common import processes
from draft_heads.data.common.processes import ALONE, Processes


@pytest.fixture
def others(monkeypatch):
    """What the other two of three processes were given."""
    told = []

    def all_gather_object(every, own):
        every[:] = [own, *(json.dumps(one) for one in told)]

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    return told


def test_processes_that_were_given_other_values_are_refused(others):
    given = {"learning_rate": 0.1, "data": ["a1"], "seed": 42}
    others[:] = [given, given]
    Processes(0, 3).check_same({**given, "data": ("a1",)})
    others[1] = {"learning_rate": 0.1, "data": ["b2"], "packing": True}
    told = r"the same data, seed, packing; of data the first has \['a1'\] and number 2 \['b2'\]: start them with one"
    with pytest.raises(ValueError, match=told):
        Processes(0, 3).check_same(given)
    ALONE.check_same(given)


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({}, ALONE),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Processes(1, 2)),
        ({"LOCAL_RANK": "3", "LOCAL_SIZE": "4"}, Processes(3, 4)),
        ({"LOCAL_RANK": "0"}, ALONE),  # Slurm shows each task itself alone
    ],
)
def test_files_are_shared_among_the_processes_of_a_node(monkeypatch, environment, node):
    """Another node may have a copy of its own."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Processes(5, 8).on_this_node() == node and ALONE.on_this_node() == ALONE


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:554] Connection closed by peer [::1]:5"), True),
        (RuntimeError("failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"), True),
        (RuntimeError("NCCL error in: a.cpp:1, unhandled system error\nLast error:\nDuplicate GPU detected"), False),
        (RuntimeError("NCCL error in: a.cpp:1\nLast error:\nconnect to 10.0.0.2<45003>: Connection refused"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError(""), False),
    ],
)
def test_a_process_that_has_ended_is_told_by_those_that_wait_for_it(monkeypatch, error, told):
    def fails(*_, **__):
        raise error

    for name in ("barrier", "all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, fails)
    second = Processes(1, 2)
    waits = second.wait, lambda: second.first_of(None), lambda: second.check_same({}), second.first_alone().__enter__
    for wait in waits:
        with pytest.raises(ValueError if told else RuntimeError) as raised:
            wait()
        assert ("another process of this run has ended (" in str(raised.value)) == told
        assert str(error) in str(raised.value)


def test_what_the_first_process_found_is_not_hidden_by_another_that_ended(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "broadcast_object_list", fails)
    with pytest.raises(ValueError, match="the folder is full"), Processes(0, 2).first_alone():
        raise ValueError("the folder is full")
    with pytest.raises(ValueError, match="another process of this run has ended"), Processes(0, 2).first_alone():
        pass


def test_the_file_of_a_shared_folder_goes_where_another_process_dies(tmp_path, monkeypatch):
    processes = Processes(0, 2)
    monkeypatch.setattr("draft_heads.data.common.processes.dist.broadcast_object_list", lambda *_, **__: None)

    def dies(self):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Processes, "wait", dies)
    with pytest.raises(RuntimeError, match="closed by peer"):
        processes.check_shared(tmp_path, "--output")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_waits_for_others_says_so(monkeypatch):
    said, lines = threading.Event(), []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "_TOLD_AFTER", 0.01)
    monkeypatch.setattr(processes.logger, "warning", lambda *line: lines.append(line) or said.set())

    def starts_late(*_, **__):
        assert said.wait(10)

    monkeypatch.setattr(dist, "init_process_group", starts_late)
    assert Processes.from_environment() == Processes(0, 2)
    assert lines == [("waiting for all of WORLD_SIZE=%d processes to start", 2)]
    said.clear()
    monkeypatch.setattr(processes, "_TOLD_AFTER", 0.3)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    Processes.from_environment()
    assert not said.wait(0.6)  # it was cancelled
