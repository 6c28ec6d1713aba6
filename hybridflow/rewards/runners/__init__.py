"""How functions are run over samples: `serial.py`, one after the other in this process."""

from hybridflow.rewards.runners.interface import Runner
from hybridflow.rewards.runners.serial import SerialRunner

__all__ = ["Runner", "SerialRunner"]
