"""The options of each role on each number of devices: its layouts, with their seconds and memory by the cost models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import rollout_traits
from hybridflow.mapping.candidates import SAVING, Limits, rollout_layouts, saving_settings, training_layouts
from hybridflow.mapping.layouts import RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.phases import RoleMemory
from hybridflow.mapping.memory.rollout import rollout_memory
from hybridflow.mapping.memory.training import training_memory
from hybridflow.mapping.operations import Operation, OperationKind, Option
from hybridflow.mapping.request import PlannedRollout, Request
from hybridflow.mapping.tables import undominated
from hybridflow.mapping.timing.generation import cache_bytes_per_token, generation_seconds
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.training import forward_seconds, offload_seconds, update_seconds
from hybridflow.mapping.timing.transfers import Transition, publish_seconds
from hybridflow.mapping.workload import Workload

_SHARES = (0.25, 0.4, 0.6, 0.8, 0.9)
"""Fractions of a device's memory that a rollout may take."""

_NOTICEABLE = 0.02
"""Fraction of a device's memory that a setting must be able to save for the search to try it."""

_CPU_CACHE_BYTES = 256 << 20
"""The KV cache of vLLM on a CPU, by default."""

_NOTHING = Seconds({})

Layouts = Mapping[str, TrainingLayout | RolloutLayout]
"""The layout of each role."""


@dataclass(frozen=True)
class _Trained:
    """A layout of a model with its costs."""

    layout: TrainingLayout
    seconds: tuple[float, ...]
    memory: RoleMemory


class StepCosts:
    """The options of each unit of a request on each number of devices."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._models = {model.role: model for model in request.models}
        self._rollout = request.rollout
        cluster, work = request.cluster, request.workload
        self._limits = Limits(
            devices_per_node=cluster.devices_per_node,
            longest_row=round(work.longest_row),
            data_parallel=request.least_prompts,
            rows=max(1, work.rows * work.epochs // work.optimizer_steps),
        )
        self._actor = "" if request.rollout is None else request.rollout.actor or ""
        self._known_seconds: dict[tuple[str, TrainingLayout], tuple[float, ...]] = {}
        self._known_rollout_seconds: dict[tuple, float] = {}
        self._workload_of = cache(self._share_of_rows)
        self._trained_of = cache(self._trained)

    def options(self, unit: tuple[str, ...], num_devices: int) -> Sequence[Option]:
        """The options of a unit on a number of devices; empty if no layout has this size."""
        rollout = self._rollout
        if rollout is None or rollout.role not in unit:
            return [
                Option({unit[0]: one.layout}, one.seconds, one.memory.resident_bytes, one.memory.extra_bytes)
                for one in self._trained_of(unit[0], num_devices, shares_weights=False)
            ]
        if len(unit) == 1:
            return list(self._apart(rollout, num_devices))
        return list(self._colocated(rollout, num_devices))

    def seconds(self, operation: Operation, layouts: Layouts) -> Seconds:
        """The seconds of an operation under the layouts of a plan."""
        if operation.kind is OperationKind.functions:
            return _NOTHING
        layout, workload = layouts[operation.role], self._workload_of(operation.rows_share)
        if isinstance(layout, TrainingLayout):
            compute = update_seconds if operation.kind is OperationKind.update else forward_seconds
            return compute(self._models[operation.role].use, layout, workload, self._request.cluster)
        rollout = self._rollout
        assert rollout is not None, f"{operation.role} has a rollout's layout"
        if operation.kind is OperationKind.generate:
            return generation_seconds(rollout.use, layout, workload, self._request.cluster)
        training = layouts.get(rollout.actor or "")
        assert isinstance(training, TrainingLayout), f"{operation.name} has no weights to receive"
        transition = Transition.micro_data if layout.is_colocated else Transition.send_recv
        return publish_seconds(rollout.use, training, layout, self._request.cluster, transition)

    def memory(self, role: str, layouts: Layouts) -> RoleMemory:
        """The memory of a role under the layouts of a plan."""
        layout, rollout = layouts[role], self._rollout
        if isinstance(layout, RolloutLayout):
            assert rollout is not None, f"{role} has a rollout's layout"
            return rollout_memory(rollout.use, layout)
        own = layouts.get(rollout.role) if rollout is not None and rollout.actor == role else None
        shares = isinstance(own, RolloutLayout) and own.is_colocated and not self._models[role].use.lora_rank
        return training_memory(role, self._models[role].use, layout, self._request.workload, shares_weights=shares)

    def least_layout(self, role: str, num_devices: int) -> TrainingLayout | RolloutLayout | None:
        """The layout of a role with the least memory per device, whether or not it fits; None if no layout exists."""
        rollout, work = self._rollout, self._request.workload
        if rollout is not None and rollout.role == role:
            most = min(rollout_traits(rollout.engine).sequences_on_gpus, work.rows)
            bare = rollout_layouts(
                rollout.use, rollout.engine, num_devices, self._limits, rollout.given, is_colocated=True
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
            layouts = training_layouts(model.use, num_devices, model.engines, self._limits, given)

        def size(layout: TrainingLayout | RolloutLayout) -> float:
            memory = self.memory(role, {role: layout})
            return memory.resident_bytes + memory.extra_bytes

        return min(layouts, key=size, default=None)

    def _trained(self, role: str, num_devices: int, *, shares_weights: bool) -> list[_Trained]:
        """The layouts of a model, without those that another is no worse than in every respect."""
        model = self._models[role]
        found = []
        for plain in training_layouts(model.use, num_devices, model.engines, self._limits, model.given):
            memory = self._training_memory(role, plain, shares_weights)
            for layout in saving_settings(plain, model.given, self._worth_saving(role, memory)):
                if layout != plain:
                    memory = self._training_memory(role, layout, shares_weights)
                if memory.resident_bytes + memory.extra_bytes <= self._memory_bytes:
                    found.append(_Trained(layout, self._training_seconds(role, layout), memory))
        return _pruned(found)

    def _training_memory(self, role: str, layout: TrainingLayout, shares_weights: bool) -> RoleMemory:
        use, workload = self._models[role].use, self._request.workload
        return training_memory(role, use, layout, workload, shares_weights=shares_weights)

    def _worth_saving(self, role: str, memory: RoleMemory) -> set[str]:
        """The settings that can save a noticeable part of a device's memory."""
        activations = max(phase.get("activations", 0.0) for phase in memory.phases.values())
        saved = {
            "gradient_checkpointing": activations if self._models[role].use.is_trained else 0.0,
            "offload_parameters": memory.resident.get(f"weights of {role}", 0.0),
            "offload_optimizer": memory.resident.get(f"optimizer of {role}", 0.0),
        }
        return {name for name, size in saved.items() if size > _NOTICEABLE * self._memory_bytes}

    def _training_seconds(self, role: str, layout: TrainingLayout) -> tuple[float, ...]:
        """The seconds of a role's operations: those of the layout that offloads nothing, and what offloading adds."""
        bare = replace(layout, offload_parameters=False, offload_optimizer=False)
        if (role, bare) not in self._known_seconds:
            self._known_seconds[role, bare] = self._seconds_of([role], {role: bare})
        if layout == bare:
            return self._known_seconds[role, bare]
        use, cluster = self._models[role].use, self._request.cluster
        operations = (each for each in self._request.operations if each.role == role)
        return tuple(
            seconds + offload_seconds(use, layout, cluster, updates=each.kind is OperationKind.update)
            for each, seconds in zip(operations, self._known_seconds[role, bare], strict=True)
        )

    def _seconds_of(self, roles: Sequence[str], layouts: Layouts) -> tuple[float, ...]:
        operations = [operation for operation in self._request.operations if operation.role in roles]
        return tuple(self.seconds(operation, layouts).total for operation in operations)

    def _apart(self, rollout: PlannedRollout, num_devices: int) -> Iterator[Option]:
        """The rollout in its own pool, which receives weights from all other devices."""
        others = max(1, self._request.cluster.num_devices - num_devices)
        sender = TrainingLayout(engine=TrainingEngine.fsdp, data=others)
        for layout in self._rollouts(rollout, num_devices, is_colocated=False):
            memory = rollout_memory(rollout.use, layout)
            layouts = {rollout.role: layout}
            seconds = self._seconds_of([rollout.role], {**layouts, rollout.actor or "": sender})
            yield Option(layouts, seconds, memory.resident_bytes, memory.extra_bytes)

    def _colocated(self, rollout: PlannedRollout, num_devices: int) -> Iterator[Option]:
        """The rollout on the actor's devices, with the actor's weights; an adapter's base model is held twice."""
        assert rollout.actor is not None, "a rollout without an actor is a unit of its own"
        operations = [each for each in self._request.operations if each.role in (rollout.actor, rollout.role)]
        generating = list(self._rollouts(rollout, num_devices, is_colocated=True))
        memories = [rollout_memory(rollout.use, layout) for layout in generating]
        shares = not self._models[rollout.actor].use.lora_rank
        for trained in self._trained_of(rollout.actor, num_devices, shares_weights=shares):
            for layout, memory in zip(generating, memories, strict=True):
                resident = trained.memory.resident_bytes + memory.resident_bytes
                extra = max(trained.memory.extra_bytes, memory.extra_bytes)
                if resident + extra > self._memory_bytes:
                    continue
                layouts = {rollout.actor: trained.layout, rollout.role: layout}
                own = iter(trained.seconds)
                seconds = (
                    next(own) if each.role == rollout.actor else self._rollout_seconds(each, layouts)
                    for each in operations
                )
                yield Option(layouts, tuple(seconds), resident, extra)

    def _rollout_seconds(self, operation: Operation, layouts: Layouts) -> float:
        """Seconds of generation, or of the transfer of weights, each computed once for the sizes it depends on."""
        training = layouts.get(self._actor)
        sizes = None
        if operation.kind is OperationKind.publish and isinstance(training, TrainingLayout):
            sizes = _sizes(training)
        key = operation.name, layouts[operation.role], sizes
        if key not in self._known_rollout_seconds:
            self._known_rollout_seconds[key] = self.seconds(operation, layouts).total
        return self._known_rollout_seconds[key]

    def _rollouts(self, rollout: PlannedRollout, num_devices: int, *, is_colocated: bool) -> Iterator[RolloutLayout]:
        """The layouts of a rollout with each size of its cache."""
        limits, work = self._limits, self._request.workload
        for bare in rollout_layouts(
            rollout.use, rollout.engine, num_devices, limits, rollout.given, is_colocated=is_colocated
        ):
            rows = max(1, work.rows // bare.replicas)
            most = rollout.given.among("max_sequences", [rollout_traits(rollout.engine).sequences_on_gpus])[0]
            layout = replace(bare, max_sequences=min(most, rows), sleeps=is_colocated)
            needed = layout.max_sequences * work.longest_row * cache_bytes_per_token(rollout.use, layout)
            for cache_bytes in self._cache_sizes(rollout, layout, needed):
                yield replace(layout, cache_bytes=cache_bytes)

    def _cache_sizes(self, rollout: PlannedRollout, layout: RolloutLayout, needed: float) -> list[float]:
        """Sizes of the KV cache per device: what shares of the device leave, up to what all rows need."""
        if rollout.engine != RolloutKind.vllm:
            return [needed]
        if self._request.cluster.device.name == "CPU":
            return [_CPU_CACHE_BYTES]
        memory = rollout_memory(rollout.use, replace(layout, cache_bytes=0.0))
        taken = memory.resident_bytes + memory.extra_bytes
        shares = _SHARES if rollout.memory_fraction is None else [rollout.memory_fraction]
        left = {min(share * self._request.cluster.device.memory_bytes - taken, needed) for share in shares}
        one_row = needed / max(layout.max_sequences, 1)
        return sorted(size for size in left if size >= one_row)

    def _share_of_rows(self, share: float) -> Workload:
        work = self._request.workload
        return work if share == 1.0 else replace(work, rows=max(1, round(work.rows * share)))

    @property
    def _memory_bytes(self) -> float:
        device = self._request.cluster.device
        return device.memory_bytes - device.reserved_bytes


def _sizes(layout: TrainingLayout) -> tuple:
    """The sizes that the transfer of weights to a rollout depends on."""
    return layout.engine, layout.tensor, layout.pipeline, layout.sequence, layout.replicas


def _pruned(found: Sequence[_Trained]) -> list[_Trained]:
    """Those that no other beats in seconds and memory, among layouts from which a rollout receives weights alike."""
    groups: dict[tuple, list[_Trained]] = {}
    for one in found:
        groups.setdefault(_sizes(one.layout), []).append(one)
    kept = []
    for group in groups.values():
        rows = [(*one.seconds, one.memory.resident_bytes, one.memory.extra_bytes) for one in group]
        kept += [group[index] for index in undominated(np.array(rows, dtype=float))]
    return kept
