"""Fits the constants of a device to measured calls, by the cost models themselves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybridflow.mapping.devices import Cluster, Efficiency
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.timing.calls import call_seconds
from hybridflow.mapping.workload import Workload

_FIRST_FACTOR, _LAST_FACTOR = 1.0, 0.002
_LAUNCH_SECONDS = (1e-6, 0.1)
_EFFICIENCY = (0.02, 1.0)
_REQUEST_SECONDS = (1e-8, 0.01)
_SLOWDOWN = (0.25, 10.0)
_USUAL_LAUNCH, _USUAL_REQUEST = 3e-4, 1e-5


@dataclass(frozen=True)
class Observation:
    """A measured call of an engine on as many processes as its layout has devices."""

    kind: OperationKind
    use: ModelUse
    layout: TrainingLayout | RolloutLayout
    workload: Workload
    seconds: float

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.layout.engine.name if isinstance(self.layout, TrainingLayout) else self.layout.engine

    @property
    def tokens(self) -> float:
        """Tokens of all rows."""
        return self.workload.tokens

    def predicted_on(self, device: Cluster) -> float:
        """Seconds of the call on devices of this kind, all on one node."""
        size = self.layout.num_devices
        cluster = replace(device, num_devices=size, devices_per_node=size)
        return call_seconds(self.kind, self.use, self.layout, self.workload, cluster).total


def fitted(cluster: Cluster, observations: Sequence[Observation]) -> Cluster:
    """The cluster with fitted efficiencies and seconds of the host: least squares of log(predicted / observed).

    Efficiencies, and the launch and request seconds of the engines that ran on one process, are fitted to those calls;
    then the launch seconds and the slowdown of each other engine to its own. The rates of `cluster` must have been
    measured without an engine.
    """
    alone = [each for each in observations if each.layout.num_devices == 1]
    engines = list(dict.fromkeys(each.engine for each in alone))
    rollouts = list(dict.fromkeys(each.engine for each in alone if each.kind is OperationKind.generate))
    hosts = [_LAUNCH_SECONDS] * len(engines) + [_REQUEST_SECONDS] * len(rollouts)
    usual = [_USUAL_LAUNCH] * len(engines) + [_USUAL_REQUEST] * len(rollouts)
    lowest, highest = zip(_EFFICIENCY, _EFFICIENCY, *hosts, strict=True)

    def with_constants(constants: Sequence[float]) -> Cluster:
        matrix, bandwidth, *seconds = constants
        launches = dict(zip(engines, seconds, strict=False))
        requests = dict(zip(rollouts, seconds[len(engines) :], strict=True))
        efficiency = Efficiency(matrix, bandwidth, cluster.device.efficiency.sync_seconds)
        device = replace(cluster.device, efficiency=efficiency, launch_seconds=launches, request_seconds=requests)
        return replace(cluster, device=device)

    def error(constants: Sequence[float]) -> float:
        return _squared_error(with_constants(constants), alone)

    starts = [[matrix, bandwidth, *usual] for matrix in (0.8, 0.4) for bandwidth in (0.8, 0.3)]
    ends = [descended(start, error, lowest=lowest, highest=highest) for start in starts]
    found = with_constants(min(ends, key=error))
    for engine in dict.fromkeys(each.engine for each in observations if each.engine not in engines):
        found = _with_engine(found, engine, [each for each in observations if each.engine == engine])
    return found


def _with_engine(cluster: Cluster, engine: str, own: Sequence[Observation]) -> Cluster:
    """The cluster with the launch seconds and the slowdown of one more engine, which fit its calls best."""

    def with_constants(constants: Sequence[float]) -> Cluster:
        launches = {**cluster.device.launch_seconds, engine: constants[0]}
        slowdown = {**cluster.device.slowdown, engine: constants[1]}
        return replace(cluster, device=replace(cluster.device, launch_seconds=launches, slowdown=slowdown))

    lowest, highest = zip(_LAUNCH_SECONDS, _SLOWDOWN, strict=True)
    found = descended(
        [_USUAL_LAUNCH, 1.0],
        lambda constants: _squared_error(with_constants(constants), own),
        lowest=lowest,
        highest=highest,
    )
    return with_constants(found)


def _squared_error(cluster: Cluster, observations: Sequence[Observation]) -> float:
    return sum(math.log(each.predicted_on(cluster) / each.seconds) ** 2 for each in observations)


def descended(
    constants: Sequence[float],
    error: Callable[[Sequence[float]], float],
    *,
    lowest: Sequence[float],
    highest: Sequence[float],
    factors: tuple[float, float] = (_FIRST_FACTOR, _LAST_FACTOR),
) -> list[float]:
    """The end of a coordinate search for the least error: each constant is multiplied by factors from 1 + the first to
    1 + the last of `factors`."""
    found, least, factor = list(constants), error(constants), factors[0]
    while factor > factors[1]:
        has_improved = False
        for place in range(len(found)):
            for scale in (1 + factor, 1 / (1 + factor)):
                changed = list(found)
                changed[place] = min(max(changed[place] * scale, lowest[place]), highest[place])
                if (smaller := error(changed)) < least - 1e-9:
                    found, least, has_improved = changed, smaller, True
        factor = factor if has_improved else factor / 2
    return found
