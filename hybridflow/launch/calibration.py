"""Measures the devices of this machine into a file: the work of `hybridflow plan --calibrate`."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from hybridflow import __version__
from hybridflow.calibration.measure import calibrate, table_of
from hybridflow.config.loop import Device
from hybridflow.launch.plan.defaults import device_in
from hybridflow.mapping.device_files import write_device
from hybridflow.observability.formatting import columns

_BUSY = 0.5
"""Load per core above which other programs make a calibration worse."""


def calibrate_devices(file: Path, say: Callable[[str], None]) -> None:
    """Measures the GPUs of this machine, or its cores if it has none; writes `file`, and says what was measured."""
    load = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    if load > _BUSY:
        say(f"Other programs use this machine (load {load:.1f} per core): the rates will be lower than without them.")
    kind = device_in(Device.auto, None)
    found = calibrate(kind, report=say)
    about = (
        f"Measured by hybridflow {__version__} on {time.strftime('%Y-%m-%d %H:%M')} in {found.seconds:.0f} seconds,"
        f" with torch {torch.__version__}."
    )
    write_device(file, found.cluster, about=about)
    for line in columns([*table_of(found)]):
        say(line)
    say(f"{file}: use it with hybridflow plan --on {file}, or trainer.device_file={file}")
