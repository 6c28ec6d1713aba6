"""The options of each role on each number of devices: its layouts, with their seconds and memory by the cost models."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil

import numpy as np

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import rollout_traits
from hybridflow.mapping.candidates import SAVING, Limits, rollout_layouts, saving_settings, training_layouts
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.elementwise import largest
from hybridflow.mapping.layouts import RolloutLayout, TrainingLayout, joined
from hybridflow.mapping.memory.phases import RoleMemory
from hybridflow.mapping.memory.rollout import rollout_memory
from hybridflow.mapping.memory.training import training_memory
from hybridflow.mapping.operations import Operation, OperationKind, Option
from hybridflow.mapping.request import PlannedRollout, Request
from hybridflow.mapping.tables import MemoryLimit, undominated
from hybridflow.mapping.timing.calls import call_seconds
from hybridflow.mapping.timing.generation import cache_bytes_per_token
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.transfers import Transition, batch_seconds, publish_seconds
from hybridflow.mapping.workload import Workload

_SHARES = (0.25, 0.4, 0.6, 0.8, 0.9)
"""Fractions of a device's memory that a rollout may take."""

_NOTICEABLE = 0.02
"""Fraction of a device's memory that a setting must be able to save for the search to try it."""

CPU_CACHE_BYTES = 256 << 20
"""The KV cache of vLLM on a CPU, by default."""

_NOTHING = Seconds({})

Layouts = Mapping[str, TrainingLayout | RolloutLayout]
"""The layout of each role."""


@dataclass(frozen=True)
class _Trained:
    """Layouts of a model that fit in memory, and their costs, row by row."""

    layouts: TrainingLayout
    costs: np.ndarray
    """[rows, operations + 3] seconds, resident, extra and host bytes."""

    transfers: np.ndarray
    """[rows, receivers] seconds until a rollout on the same devices has the weights."""

    def on(self, num_devices: int) -> "_Trained":
        """The layouts on a number of devices that no other of them beats in every respect."""
        rows = np.flatnonzero(self.layouts.num_devices == num_devices)
        rows = rows[undominated(np.concatenate([self.costs[rows], self.transfers[rows]], axis=1))]
        return _Trained(self.layouts.at(rows), self.costs[rows], self.transfers[rows])


class StepCosts:
    """The options of each unit of a request on each number of devices."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._models = {model.role: model for model in request.models}
        self._rollout = request.rollout
        work = request.workload
        self._limits = Limits(
            devices_per_node=request.cluster.devices_per_node,
            longest_row=round(work.longest_row),
            prompts=request.batch_prompts,
            rows=max(1, work.rows * work.epochs // work.optimizer_steps),
        )
        self._actor = "" if request.rollout is None else request.rollout.actor or ""
        self._workload_of = cache(self._share_of_rows)

    def options(self, unit: tuple[str, ...], sizes: Sequence[int]) -> Sequence[Sequence[Option]]:
        """The options of a unit on each number of devices; see `Costs`."""
        rollout = self._rollout
        if rollout is None or rollout.role not in unit:
            return list(self._alone(unit[0], sizes))
        if len(unit) == 1:
            return [list(self._apart(rollout, size)) for size in sizes]
        return list(self._colocated(rollout, sizes))

    def seconds(self, operation: Operation, layouts: Layouts) -> Seconds:
        """The seconds of an operation under the layouts of a plan."""
        if operation.kind is OperationKind.functions:
            return _NOTHING
        layout, workload = layouts[operation.role], self._workload_of(operation.rows_share)
        rollout = self._rollout
        if isinstance(layout, TrainingLayout):
            use, own = self._models[operation.role].use, self._as_run(operation.role, layout)
            cluster = self._cluster_of(operation.role)
            received = batch_seconds(workload.tokens, layout.data, cluster)
            return call_seconds(operation.kind, use, own, workload, cluster).with_part("batch", received)
        assert rollout is not None, f"{operation.role} has a rollout's layout"
        if operation.kind is OperationKind.generate:
            cluster = self._cluster_of(rollout.role)
            received = batch_seconds(workload.rows * workload.prompts.mean, layout.replicas, cluster)
            return call_seconds(operation.kind, rollout.use, layout, workload, cluster).with_part("batch", received)
        training = layouts.get(rollout.actor or "")
        assert isinstance(training, TrainingLayout), f"{operation.name} has no weights to receive"
        return self._publish_seconds(rollout, training, layout)

    def memory(self, role: str, layouts: Layouts) -> RoleMemory:
        """The memory of a role under the layouts of a plan."""
        layout, rollout = layouts[role], self._rollout
        if isinstance(layout, RolloutLayout):
            assert rollout is not None, f"{role} has a rollout's layout"
            return rollout_memory(rollout.use, layout)
        own = layouts.get(rollout.role) if rollout is not None and rollout.actor == role else None
        shares = isinstance(own, RolloutLayout) and own.is_colocated and not self._models[role].use.lora_rank
        return self._training_memory(role, layout, shares)

    def least_layout(self, role: str, num_devices: int) -> TrainingLayout | RolloutLayout | None:
        """The layout of a role with the least memory per device; of a model, one that fits if there is one. None if
        the role has no layout."""
        rollout, work = self._rollout, self._request.workload
        if rollout is not None and rollout.role == role:
            most = min(rollout_traits(rollout.engine).sequences_on_gpus, work.rows)
            bare = rollout_layouts(
                rollout.use,
                rollout.engine,
                num_devices,
                self._limits_of(rollout.role),
                rollout.given,
                is_colocated=True,
            )
            layouts = [
                replace(
                    each, max_sequences=most, cache_bytes=work.longest_row * cache_bytes_per_token(rollout.use, each)
                )
                for each in bare
            ]
        else:
            model = self._models[role]
            saving = SAVING if model.use.is_trained else ("offload_parameters",)
            given = replace(model.given, values={**dict.fromkeys(saving, True), **model.given.values})
            found = training_layouts(model.use, [num_devices], model.engines, self._limits_of(role), given)
            layouts = [layout for layouts in found for layout in layouts.listed()]
            settings = [name for name in saving if name not in model.given.values]
            layouts = [
                replace(layout, **dict(zip(settings, values, strict=True)))
                for values in product((True, False), repeat=len(settings))
                for layout in layouts
            ]
        limit = memory_limit(self._cluster_of(role))

        def size(layout: TrainingLayout | RolloutLayout) -> tuple[bool, float]:
            memory = self.memory(role, {role: layout})
            device_bytes = memory.resident_bytes + memory.extra_bytes
            return not limit.holds(device_bytes, memory.host_bytes), device_bytes

        return min(layouts, key=size, default=None)

    def _trained(
        self, role: str, sizes: Sequence[int], *, receivers: Sequence[RolloutLayout] = (), shares_weights: bool = False
    ) -> _Trained:
        """The layouts of a model on these numbers of devices."""
        model, limit, rollout = self._models[role], memory_limit(self._cluster_of(role)), self._rollout
        layouts, costs, transfers, order = [], [], [], []
        engines = training_layouts(model.use, sizes, model.engines, self._limits_of(role), model.given)
        for engine, plain in enumerate(engines):
            worth = self._worth_saving(role, self._training_memory(role, plain, shares_weights))
            for choice, (rows, layout) in enumerate(saving_settings(plain, model.given, worth)):
                memory = self._training_memory(role, layout, shares_weights)
                own = _columns(len(rows), memory.resident_bytes, memory.extra_bytes, memory.host_bytes)
                fits = np.flatnonzero(limit.held(own[:, 0] + own[:, 1], own[:, 2]))
                layouts.append(layout := layout.at(fits))
                seconds = self._seconds_of([role], {role: layout})
                costs.append(np.concatenate([_columns(len(fits), *seconds), own[fits]], axis=1))
                sent = (self._publish_seconds(rollout, layout, each).total for each in receivers if rollout is not None)
                transfers.append(_columns(len(fits), *sent))
                order.append(_columns(len(fits), engine, rows[fits], choice))
        rows = np.lexsort(np.concatenate(order).T[::-1])  # by engine, then by layout, then by its settings
        return _Trained(joined(layouts).at(rows), np.concatenate(costs)[rows], np.concatenate(transfers)[rows])

    def _publish_seconds(self, rollout: PlannedRollout, training: TrainingLayout, layout: RolloutLayout) -> Seconds:
        """The seconds of the transfer of weights to a rollout."""
        transition = Transition.micro_data if layout.is_colocated else Transition.send_recv
        between = _between(self._cluster_of(rollout.actor or ""), self._cluster_of(rollout.role))
        return publish_seconds(rollout.use, training, layout, between, transition).scaled(between.crowding)

    def _training_memory(self, role: str, layout: TrainingLayout, shares_weights: bool) -> RoleMemory:
        use, workload, has_host = self._models[role].use, self._request.workload, self._cluster_of(role).host_bytes > 0
        use, layout = replace(use, copies_state=self._request.keeps_copies), self._as_run(role, layout)
        return training_memory(role, use, layout, workload, shares_weights=shares_weights, has_host=has_host)

    def _as_run(self, role: str, layout: TrainingLayout) -> TrainingLayout:
        """A layout without the offloading that has no effect: the memory of a CPU is that of its node."""
        if self._cluster_of(role).host_bytes:
            return layout
        return replace(layout, offload_parameters=False, offload_optimizer=False)

    def _worth_saving(self, role: str, memory: RoleMemory) -> Mapping[str, np.ndarray]:
        """Where the settings can save a noticeable part of a device's memory."""
        activations = largest(phase.get("activations", 0.0) for phase in memory.phases.values())
        saved = {"gradient_checkpointing": activations if self._models[role].use.is_trained else 0.0}
        if self._cluster_of(role).host_bytes:
            saved["offload_parameters"] = memory.resident.get(f"weights of {role}", 0.0)
            saved["offload_optimizer"] = memory.resident.get(f"optimizer of {role}", 0.0)
        noticeable = _NOTICEABLE * memory_limit(self._cluster_of(role)).device_bytes
        return {name: np.greater(size, noticeable) for name, size in saved.items()}

    def _seconds_of(self, roles: Sequence[str], layouts: Layouts) -> tuple[float, ...]:
        operations = [operation for operation in self._request.operations if operation.role in roles]
        return tuple(self.seconds(operation, layouts).total for operation in operations)

    def _alone(self, role: str, sizes: Sequence[int]) -> Iterator[list[Option]]:
        """A model of which no rollout shares the devices and the weights."""
        trained = self._trained(role, sizes)
        for size in sizes:
            own = trained.on(size)
            yield _options(own.costs, ({role: layout} for layout in own.layouts.listed()))

    def _apart(self, rollout: PlannedRollout, num_devices: int) -> Iterator[Option]:
        """The rollout in its own pool. How many devices the actor has is not known yet, so the seconds of the transfer
        of weights are the least with any number of them: see `planner.answer`."""
        senders = [
            TrainingLayout(engine=TrainingEngine.fsdp, data=actors) for actors in self._numbers_of_actors(num_devices)
        ]
        for layout in self._rollouts(rollout, num_devices, is_colocated=False):
            memory = rollout_memory(rollout.use, layout)
            layouts = {rollout.role: layout}
            found = [self._seconds_of([rollout.role], {**layouts, rollout.actor or "": each}) for each in senders]
            yield _option(layouts, tuple(map(min, *found)) if len(found) > 1 else found[0], memory)

    def _numbers_of_actors(self, num_devices: int) -> list[int]:
        """The possible numbers of the actor's devices, next to a rollout on `num_devices`, with the fastest transfer of
        weights: the given one, otherwise all other devices, or the others of the rollout's node."""
        request, cluster = self._request, self._request.cluster
        given = request.pool_devices.get(request.pinned.get(self._actor, ""))
        if given is not None:
            return [max(1, given)]
        found = {max(1, cluster.num_devices - num_devices), max(1, cluster.devices_per_node - num_devices)}
        return sorted(found)

    def _colocated(self, rollout: PlannedRollout, sizes: Sequence[int]) -> Iterator[list[Option]]:
        """The rollout on the actor's devices, with the actor's weights; an adapter's base model is held twice."""
        assert rollout.actor is not None, "a rollout without an actor is a unit of its own"
        generating = {size: list(self._rollouts(rollout, size, is_colocated=True)) for size in sizes}
        receivers = {_shape(layout): layout for layouts in generating.values() for layout in layouts}
        shares = not self._models[rollout.actor].use.lora_rank
        trained = self._trained(rollout.actor, sizes, receivers=list(receivers.values()), shares_weights=shares)
        columns = {shape: column for column, shape in enumerate(receivers)}
        for size, layouts in generating.items():
            own = trained.on(size)
            sent = own.transfers[:, [columns[_shape(layout)] for layout in layouts]]
            yield self._pairs(rollout, own, layouts, sent)

    def _pairs(
        self, rollout: PlannedRollout, trained: _Trained, layouts: Sequence[RolloutLayout], sent: np.ndarray
    ) -> list[Option]:
        """Each layout of the actor with each of the rollout; `sent` has the seconds of their transfers of weights."""
        actor, actors = rollout.actor or "", trained.layouts.listed()
        operations = [each for each in self._request.operations if each.role in (actor, rollout.role)]
        pairs = np.empty((*sent.shape, len(operations) + 3))
        own = iter(trained.costs.T[:, :, None])
        for position, operation in enumerate(operations):
            if operation.role == actor:
                pairs[..., position] = next(own)
            elif operation.kind is OperationKind.publish:
                pairs[..., position] = sent
            else:
                pairs[..., position] = [self.seconds(operation, {rollout.role: each}).total for each in layouts]
        memories = [rollout_memory(rollout.use, layout) for layout in layouts]
        pairs[..., -3] = next(own) + [memory.resident_bytes for memory in memories]
        pairs[..., -2] = np.maximum(next(own), [memory.extra_bytes for memory in memories])
        pairs[..., -1] = next(own)
        costs = pairs.reshape(-1, len(operations) + 3)
        fits = np.flatnonzero(costs[:, -3] + costs[:, -2] <= memory_limit(self._cluster_of(actor)).device_bytes)
        kept = fits[undominated(costs[fits])]
        choices = (divmod(index, len(layouts)) for index in kept.tolist())
        return _options(costs[kept], ({actor: actors[row], rollout.role: layouts[column]} for row, column in choices))

    def _rollouts(self, rollout: PlannedRollout, num_devices: int, *, is_colocated: bool) -> Iterator[RolloutLayout]:
        """The layouts of a rollout with each size of its cache."""
        limits, work = self._limits_of(rollout.role), self._request.workload
        for bare in rollout_layouts(
            rollout.use, rollout.engine, num_devices, limits, rollout.given, is_colocated=is_colocated
        ):
            rows = ceil(work.rows / bare.replicas)
            most = rollout.given.among("max_sequences", [rollout_traits(rollout.engine).sequences_on_gpus])[0]
            layout = replace(
                bare,
                max_sequences=min(most, rows),
                copies_weights=rollout.copies_weights and not is_colocated,
                sleeps=is_colocated,
                captures_graphs=rollout.captures_graphs and not self._cluster_of(rollout.role).device.is_cpu,
            )
            needed = layout.max_sequences * work.longest_row * cache_bytes_per_token(rollout.use, layout)
            for cache_bytes in self._cache_sizes(rollout, layout, needed):
                yield replace(layout, cache_bytes=cache_bytes)

    def _cache_sizes(self, rollout: PlannedRollout, layout: RolloutLayout, needed: float) -> list[float]:
        """Sizes of the KV cache per device: what shares of the device leave, up to what all rows need."""
        if rollout.engine != RolloutKind.vllm:
            return [needed]
        device = self._cluster_of(rollout.role).device
        if device.is_cpu:
            return [CPU_CACHE_BYTES]
        memory = rollout_memory(rollout.use, replace(layout, cache_bytes=0.0, copies_weights=False))
        taken = memory.resident_bytes + memory.extra_bytes
        shares = _SHARES if rollout.memory_fraction is None else [rollout.memory_fraction]
        left = {min(share * device.memory_bytes - taken, needed) for share in shares}
        one_row = needed / max(layout.max_sequences, 1)
        return sorted(size for size in left if size >= one_row)

    def _cluster_of(self, role: str) -> Cluster:
        return self._request.cluster_of(role)

    def _limits_of(self, role: str) -> Limits:
        is_trained = role in self._models and self._models[role].use.is_trained
        prompts = self._request.minibatch_prompts if is_trained else self._request.batch_prompts
        cluster = self._cluster_of(role)
        own = {"devices_per_node": cluster.devices_per_node, "is_cpu": cluster.device.is_cpu}
        return replace(self._limits, prompts=prompts, **own)

    def _share_of_rows(self, share: float) -> Workload:
        work = self._request.workload
        return work if share == 1.0 else replace(work, rows=max(1, round(work.rows * share)))


def memory_limit(cluster: Cluster) -> MemoryLimit:
    """The memory per device that roles can take."""
    device = cluster.device
    return MemoryLimit(device.memory_bytes - device.reserved_bytes, cluster.offload_bytes)


def _between(first: Cluster, second: Cluster) -> Cluster:
    """The devices of two pools, connected by the slower network if they are of different clusters."""
    if first == second:
        return first
    link = min(first.network_link, second.network_link)
    return replace(second, node_link=link, network_link=link)


def _option(layouts: Layouts, seconds: tuple[float, ...], memory: RoleMemory) -> Option:
    return Option(layouts, seconds, memory.resident_bytes, memory.extra_bytes, memory.host_bytes)


def _options(costs: np.ndarray, choices: Iterable[Layouts]) -> list[Option]:
    """Options from rows of seconds, resident, extra and host bytes."""
    return [
        Option(choice, tuple(seconds), resident, extra, host)
        for choice, (*seconds, resident, extra, host) in zip(choices, costs.tolist(), strict=True)
    ]


def _shape(layout: RolloutLayout) -> tuple[int, int]:
    """The sizes of a rollout on which the transfer of weights to it on the actor's devices depends."""
    return layout.tensor, layout.pipeline


def _columns(num_rows: int, *columns: np.ndarray | float) -> np.ndarray:
    """[rows, columns] numbers that differ by row, or are the same in all."""
    found = np.empty((num_rows, len(columns)))
    for number, column in enumerate(columns):
        found[:, number] = column
    return found
