"""Measurements of this machine, in processes of their own."""

import os
import time

import pytest
import torch

from hybridflow.calibration.engines import Rows, generations, training_calls
from hybridflow.calibration.measure import measured_cluster
from hybridflow.calibration.processes import Place, run_on
from hybridflow.calibration.rates import DeviceRates, device_rates, link_rates, timed
from hybridflow.cli.main import main
from hybridflow.config.paths import builtin_path
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import ROLLOUT_ENGINES, TRAINING_ENGINES
from hybridflow.errors import ResourceError
from hybridflow.mapping.device_files import find_device
from hybridflow.mapping.operations import OperationKind

MODEL = builtin_path("builtin:calculator")


def measure(place: Place):
    """A small part of a calibration."""
    rows = (Rows(2, 4, 4),)
    trained = training_calls(place, TrainingEngine.fsdp, MODEL, rows)
    return link_rates(place), trained, generations(place, "transformers", MODEL, rows)


def fail(place: Place) -> None:
    raise ValueError("a wrong number")


def end_at_once(place: Place) -> None:
    raise SystemExit(3)


def wait(place: Place) -> None:
    time.sleep(60)


def test_two_processes_measure_collectives_and_the_calls_of_engines():
    links, trained, generated = run_on("cpu", 2, measure)[0]
    assert links.size == 2
    assert 0 < links.sync_seconds < 1
    assert 1e6 < links.bandwidth < 1e12
    assert [call.kind for call in trained] == [OperationKind.forward, OperationKind.update]
    assert {call.layout.data for call in trained} == {2}
    assert {call.workload.rows for call in trained} == {4}
    assert 0 < trained[0].seconds < trained[1].seconds
    assert generated[0].kind is OperationKind.generate
    assert generated[0].tokens == 16


def test_the_rates_of_a_cpu_are_those_of_a_cpu():
    rates = device_rates(Place(0, 1, torch.device("cpu")))
    # From a slow core in a shared virtual machine to a fast one with matrix units.
    assert 1e8 < rates.float32_flops < 1e13
    assert 1e8 < rates.memory_bandwidth < 1e12
    assert 0 < rates.process_bytes < rates.memory_bytes


@pytest.mark.parametrize(("process_mib", "reserved_mib"), [(500, 2688), (3000, 3000)])
def test_a_calibrated_gpu_reserves_at_least_what_the_known_device_does(process_mib, reserved_mib):
    rates = DeviceRates(1e13, 1e14, 1e12, 1e10, memory_bytes=80 << 30, process_bytes=process_mib << 20)
    found = measured_cluster(find_device("A100-80"), rates, [], 0.0)
    assert found.device.reserved_bytes == reserved_mib << 20


@pytest.mark.parametrize(
    ("program", "message", "remedy"),
    [
        (fail, "process 0 failed: ValueError: a wrong number", "in fail"),
        pytest.param(end_at_once, "ended with exit status 3", "ran out of memory", marks=pytest.mark.slow),
    ],
)
def test_the_failure_of_a_process_ends_the_measurement(program, message, remedy):
    with pytest.raises(ResourceError, match=message) as caught:
        run_on("cpu", 1, program)
    assert remedy in caught.value.remedy


def test_a_measurement_that_hangs_is_given_up():
    with pytest.raises(ResourceError, match="did not end within 0.5 s") as caught:
        run_on("cpu", 1, wait, timeout_seconds=0.5)
    assert "Stop other programs" in caught.value.remedy


def test_seconds_that_other_programs_took_do_not_count():
    place = Place(0, 1, torch.device("cpu"))
    # A sleeping process runs for well under a millisecond.
    assert max(timed(place, lambda: time.sleep(0.05), repeats=2)) < 0.02


@pytest.mark.slow  # a minute on a quiet machine
def test_the_commands_of_the_documentation_calibrate_plan_and_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--calibrate", "devices.yaml"]) == 0
    assert "devices.yaml: use it with hybridflow plan --on devices.yaml" in " ".join(capsys.readouterr().err.split())
    device = find_device("devices.yaml").device
    installed = {str(engine) for engine, traits in ROLLOUT_ENGINES.items() if traits.is_installed}
    installed |= {engine.name for engine, traits in TRAINING_ENGINES.items() if traits.is_installed}
    assert set(device.launch_seconds) == installed
    assert all(0 < seconds < 0.1 for seconds in device.launch_seconds.values())
    assert all(seconds < 0.01 for seconds in device.request_seconds.values())
    assert 1 <= device.cores <= (os.cpu_count() or 1)
    assert main(["plan", "ppo", "--on", "2xdevices.yaml"]) == 0
    run = ["trainer.devices=2", "trainer.threads=1", "placement=auto", "trainer.device_file=devices.yaml"]
    assert main(["ppo", "--dry-run", *run]) == 0
