"""Peak memory and energy of drafters that take turns, on a GPU that is played by a list of numbers."""

import sys
from types import SimpleNamespace

import pytest
import torch

from draft_heads.inference.evaluation import evaluate as evaluation
from draft_heads.inference.evaluation.html.page import page
from draft_heads.inference.evaluation.meter import Meter, Usage, devices_of, energy_counter
from draft_heads.inference.evaluation.metrics import result_rows
from draft_heads.inference.evaluation.report import build_report, markdown
from tests.inference.stub_engine import StubEngine, StubOracle, benchmark, evaluate, render

GPU = torch.device("cuda", 0)
TARGET = {"path": "models/stub", "parameters": 1234567, "dtype": "float32", "device": "cpu"}


class Memory:
    """What torch.cuda tells of memory: `hold` changes what is allocated."""

    def __init__(self):
        self.now = self.peak = 100  # the weights

    def hold(self, *levels):
        for level in levels:
            self.now += level
            self.peak = max(self.peak, self.now)


@pytest.fixture
def memory(monkeypatch):
    found = Memory()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(found, "peak", found.now))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: found.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: found.peak)
    return found


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml whose GPU takes half a joule between two questions."""
    told = iter(range(0, 10**6, 500))
    module = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: next(told),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-ab"))
    return module


def test_a_peak_is_the_drafters_own_whatever_the_others_keep(memory, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    meter = Meter([GPU])
    assert meter.measure("a", lambda: memory.hold(5, -2)) == (None, Usage(5))  # it keeps 3
    assert meter.measure("b", lambda: memory.hold(40, -10)) == (None, Usage(40))  # it keeps 30
    assert meter.measure("a", lambda: memory.hold(2, -2)) == (None, Usage(5))  # 2, and the 3 that it kept
    assert meter.measure("a", lambda: memory.hold(4, -4)) == (None, Usage(7))
    assert meter.measure("b", lambda: "answer") == ("answer", Usage(30))


def test_energy_is_the_counters_difference(memory, nvml):
    assert Meter([GPU]).measure("a", lambda: "answer") == ("answer", Usage(0, 0.5))


def test_of_a_target_on_several_gpus_both_are_sums(monkeypatch, nvml):
    """Two GPUs, of which the first allocates 4 and keeps 1, the second allocates 3; each takes half a joule."""
    first, second = GPU, torch.device("cuda", 1)
    target = SimpleNamespace(device=first, layer_devices=[first, second, second, first])
    assert devices_of(target) == [first, second]
    each = {first: Memory(), second: Memory()}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: setattr(each[device], "peak", each[device].now)
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: each[device].now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: each[device].peak)
    meter = Meter(devices_of(target))
    assert meter.measure("a", lambda: (each[first].hold(4, -3), each[second].hold(3, -3)))[1] == Usage(7, 2.0)
    assert meter.measure("a", lambda: None)[1] == Usage(1, 2.0)


def test_a_gpu_that_does_not_count_joules_is_named_in_the_log(nvml, caplog):
    caplog.set_level("INFO")

    def unsupported(gpu):
        raise RuntimeError("Not Supported")

    nvml.nvmlDeviceGetTotalEnergyConsumption = unsupported
    assert energy_counter(GPU) is None
    assert "energy is not measured: the GPU does not tell it (Not Supported)" in caplog.text


def test_a_cpu_tells_neither_and_reports_say_nothing_of_them():
    assert Meter([torch.device("cpu")]).measure("a", lambda: "answer") == ("answer", Usage())
    found = evaluate({"vanilla": StubEngine(), "fast": StubEngine(2)}, StubOracle(), [benchmark()], render)
    report = build_report(found, TARGET, {"max_nodes": 32}, 0)
    assert {(row["peak_memory_bytes"], row["joules_per_token"]) for row in report["results"]} == {(None, None)}
    assert "energy" not in markdown(report) and "energy" not in page(report)


@pytest.mark.parametrize("group_size", [1, 4])
def test_rows_have_the_highest_peak_and_the_joules_of_a_token(monkeypatch, group_size):
    names = []

    class Told(Meter):
        def measure(self, name, answer):
            names.append(name)
            return answer(), Usage(len(names) << 20, 2.0)

    monkeypatch.setattr(evaluation, "Meter", Told)
    engines = {"vanilla": StubEngine(), "fast": StubEngine(2)}
    found = evaluate(engines, StubOracle(), [benchmark()], render, group_size=group_size)
    whole = {row["drafter"]: row for row in result_rows(found, 0) if row["category"] is None}
    turns = 4 if group_size == 1 else 2  # answered together: the first turns of all questions, then the second
    for name, row in whole.items():
        last = max(place for place, one in enumerate(names, 1) if one == name)
        assert row["peak_memory_bytes"] == last << 20 and names.index(name) < 2  # the warm-up is measured, not counted
        assert row["joules_per_token"] == pytest.approx(2 * turns / row["new_tokens"])
    report = build_report(found, TARGET, {"max_nodes": 32, "batch_size": group_size}, 0)
    by_category = {row["joules_per_token"] is None for row in report["results"] if row["category"]}
    assert by_category == {group_size > 1}
    assert "## Peak GPU memory and energy" in markdown(report) and "Peak GPU memory and energy" in page(report)
    assert f"| bench | fast | {whole['fast']['peak_memory_bytes'] >> 20} |" in markdown(report)
