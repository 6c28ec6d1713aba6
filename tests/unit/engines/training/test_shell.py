"""What training engines share: an optimizer made when needed and put where it waits, and steps that are counted."""

import math

import pytest
import torch

from hybridflow.config.model import Model
from hybridflow.config.training import Optimizer, Schedule, Training
from hybridflow.engines.training import families
from hybridflow.engines.training.families import LANGUAGE, EngineSetup
from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.interface import Part
from hybridflow.engines.training.shell import EngineShell
from hybridflow.errors import EngineError
from hybridflow.parallel.groups import Ranks
from tests.unit.engines.training.late_lane import LateLane


class Moved:
    """An optimizer and parameters that write down where they were sent."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def rest(self, shelf: HostShelf) -> None:
        self.places.append("optimizer to the host")

    def bring_back(self) -> None:
        self.places.append("optimizer to the device")

    def parameters(self, shelf: HostShelf, *, away: bool) -> None:
        self.places.append(f"parameters to the {'host' if away else 'device'}")


def shell_of(moved: Moved, **training: object) -> EngineShell[Moved]:
    setup = EngineSetup(LANGUAGE, Model(path="any"), Training(**training), 4, torch.device("cpu"), Ranks.alone())
    return EngineShell(setup, make_optimizer=lambda: moved, move_parameters=moved.parameters)


def test_an_optimizer_is_made_when_it_is_needed_and_put_where_it_waits(monkeypatch):
    monkeypatch.setattr(families, "lane_to", lambda device: LateLane())
    moved = Moved()
    shell = shell_of(moved, offload_optimizer=True)
    shell.offload(*Part)
    assert shell.made_optimizer is None and moved.places == ["parameters to the host"]
    assert shell.optimizer is moved
    with shell.weights_here():
        assert shell.away == {Part.optimizer}
    shell.onload(*Part)
    shell.onload(*Part)
    expected = ["optimizer to the host", "parameters to the device", "parameters to the host"]
    assert moved.places[1:] == [*expected, "parameters to the device", "optimizer to the device"]


def test_steps_are_counted_unless_their_gradient_is_not_finite():
    shell = shell_of(Moved(), optimizer=Optimizer(learning_rate=0.4, schedule=Schedule.linear))
    rates: list[float] = []
    for norm in (1.0, 2.0):
        assert shell.step(norm, rates.append)["grad_norm"].value == norm
    with pytest.raises(EngineError, match="at optimizer step 3") as caught:
        shell.step(math.inf, rates.append)
    assert "Lower the learning rate" in caught.value.remedy
    assert rates == pytest.approx([0.4, 0.3]) and shell.steps == 2
