"""The workers of a role, as the driver calls them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.config.nearest import did_you_mean
from hybridflow.controller.backends.interface import Backend, Handle, Pending, RoleMeshes
from hybridflow.controller.batch_ref import BatchRef, View
from hybridflow.controller.colocation import VALUE, AnswerForm, WorkerKey
from hybridflow.controller.dispatch import Call, Dispatch, dispatched
from hybridflow.controller.futures import Future, combined
from hybridflow.controller.protocols import TransferProtocol
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.row_index import inverse, is_identity
from hybridflow.controller.tables import StageTable
from hybridflow.controller.transfer import TransferSpec, specs_of
from hybridflow.controller.worker import Worker
from hybridflow.errors import ConfigError
from hybridflow.parallel import ParallelMesh

RoleMethod = Callable[..., Future | BatchRef]


class WorkerGroup:
    """A worker on each device of a pool, called together. Every method marked `@transfer` is a method of the group.

    `minibatch_rows` is how many rows an optimizer step takes, for methods under the protocol MINIBATCHES.
    A call returns at once: a `BatchRef` where the method provides columns (the batch it was given, and these),
    else a `Future` of the answering ranks' answers, combined (see `futures.combined`).

        critic = WorkerGroup(CriticWorker, pool, backend, role="critic", kwargs={"config": config.critic})
        batch = batch.join(critic.values(batch))
        metrics = critic.update(batch).result()
    """

    def __init__(
        self,
        worker_class: type[Worker],
        pool: ResourcePool,
        backend: Backend,
        *,
        role: str,
        mesh: ParallelMesh | None = None,
        generation_mesh: ParallelMesh | None = None,
        kwargs: Mapping[str, object] | None = None,
        minibatch_rows: int | None = None,
    ) -> None:
        mesh = mesh or ParallelMesh({"data": pool.devices})
        for name, size in {"mesh": mesh.size, "generation mesh": (generation_mesh or mesh).size}.items():
            if size != pool.devices:
                raise ConfigError(
                    f"The {name} of '{role}' has {size} ranks, the pool '{pool.name}' {pool.devices} devices.",
                    remedy="Let the product of the role's parallel sizes be the devices of its pool.",
                )
        self.role = role
        self.worker_class = worker_class
        self.pool = pool
        self.backend = backend
        self.minibatch_rows = minibatch_rows
        self.meshes = {"training": mesh, "generation": generation_mesh or mesh}
        self._linked: dict[str, RoleMethod] = {}
        self._renamed: Mapping[str, str] = {}
        self._specs = specs_of(worker_class)
        taken = [name for name in self._specs if name in dir(WorkerGroup) or name in self.__dict__]
        if taken:
            raise ConfigError(
                f"{worker_class.__name__}'s methods {taken} have names that every WorkerGroup uses itself.",
                remedy="Rename the methods.",
            )
        self._handles = backend.spawn(
            worker_class, pool, role=role, meshes=RoleMeshes(mesh, generation_mesh), kwargs=kwargs or {}
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._handles)

    @property
    def handles(self) -> Sequence[Handle]:
        """The workers, by rank."""
        return self._handles

    def view(self, role: str, *, methods: Mapping[str, str] | None = None) -> "WorkerGroup":
        """The same workers under another role's name, which errors then use.

        `methods` are the workers' own names of methods that the role has under other names.
        """
        view = WorkerGroup.__new__(WorkerGroup)
        view.__dict__.update(
            {name: value for name, value in self.__dict__.items() if not isinstance(value, _BoundMethod)}
        )
        view.role = role
        view._renamed = methods or {}
        view._handles = [
            Handle(WorkerKey(handle.key.worker, role), handle.rank, handle.pool, handle.host)
            for handle in self._handles
        ]
        return view

    def link(self, name: str, other: "WorkerGroup", other_name: str) -> None:
        """From now on a call of the method `name` calls the other group's method with the same arguments as well.

        For what two pools do together, such as sending and receiving weights; the answer stays this group's.
        """
        self._linked[name] = other.__getattr__(other_name)

    def dead_ranks(self) -> list[int]:
        """Ranks whose process has ended."""
        ours = {(handle.key.worker, handle.rank) for handle in self._handles}
        gone = [handle for handle in self.backend.dead() if handle.pool is self.pool]
        return sorted({handle.rank for handle in gone if (handle.key.worker, handle.rank) in ours})

    def linked(self, name: str) -> RoleMethod | None:
        """What a call of the method calls as well."""
        return self._linked.get(name)

    def kill(self) -> None:
        """Ends the processes of this group, and whatever else lives in them."""
        self.backend.kill(self._handles)

    def __getattr__(self, name: str) -> RoleMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        own_name = self._renamed.get(name, name)
        spec = self._specs.get(own_name)
        if spec is None:
            raise ConfigError(_unknown(name, self.role, self.worker_class), remedy=_nearest(name, self._specs))
        bound = _BoundMethod(self, own_name, spec)
        self.__dict__[name] = bound
        return bound


class _BoundMethod:
    """One method of a group: sends out its calls and gathers their answers."""

    def __init__(self, group: WorkerGroup, name: str, spec: TransferSpec) -> None:
        self._group = group
        self._name = name
        self._spec = spec
        protocol = spec.protocol
        self._mesh = group.meshes[protocol.mesh if isinstance(protocol, TransferProtocol) else "training"]
        self._value = VALUE if spec.changes else AnswerForm(changes=False)
        self._nothing = AnswerForm(wanted=False, changes=spec.changes)

    def __call__(self, *args: object, **kwargs: object) -> Future | BatchRef:
        group, spec = self._group, self._spec
        call = Call(group.role, self._name, spec, args, kwargs)
        dispatch = dispatched(call, self._mesh, group.backend, minibatch_rows=group.minibatch_rows)
        form = self._value
        if spec.provides:
            form = AnswerForm(provides=spec.provides, keeps_rows=dispatch.keeps_rows, changes=spec.changes)
        answering = set(dispatch.answering)
        calls = [
            group.backend.call(handle, self._name, arguments, form if rank in answering else self._nothing)
            for rank, (handle, arguments) in enumerate(zip(group.handles, dispatch.arguments, strict=True))
        ]
        if spec.provides:
            return self._reference(dispatch, calls)
        linked = self._group.linked(self._name)
        return self._future(dispatch, calls, [] if linked is None else linked(*args, **kwargs).pending())

    def _future(self, dispatch: Dispatch, calls: Sequence[Pending], linked: Sequence[Pending]) -> Future:
        protocol, mesh, ranks = self._spec.protocol, self._mesh, dispatch.answering

        def combine(values: Sequence[object]) -> object:
            answers = [values[rank] for rank in ranks]
            return combined(answers) if isinstance(protocol, TransferProtocol) else protocol.collect(answers, mesh)

        return Future([*calls, *linked], self._group.backend, combine)

    def _reference(self, dispatch: Dispatch, calls: Sequence[Pending]) -> BatchRef:
        backend, provides, protocol = self._group.backend, self._spec.provides, self._spec.protocol
        answers = [calls[rank] for rank in dispatch.answering]
        if not isinstance(protocol, TransferProtocol):
            return self._collected(answers, dispatch, protocol.collect)
        if not dispatch.keeps_rows or dispatch.batch is None:
            return BatchRef([View(StageTable(answers, provides, None, backend))], backend)
        sizes = None if dispatch.parts is None else [len(part) for part in dispatch.parts]
        return dispatch.batch.extended(StageTable(answers, provides, sizes, backend), _answer_index(dispatch.parts))

    def _collected(self, answers: Sequence[Pending], dispatch: Dispatch, collect: Callable) -> BatchRef:
        backend, provides = self._group.backend, self._spec.provides
        tables = [StageTable([answer], provides, None, backend) for answer in answers]
        given = dispatch.rank_batches
        refs = [
            given[rank].extended(table, None) if given is not None else BatchRef([View(table)], backend)
            for rank, table in enumerate(tables)
        ]
        collected = collect(refs, self._mesh)
        if not isinstance(collected, BatchRef):
            raise ConfigError(
                f"The protocol of '{self._group.role}.{self._name}' collected a {type(collected).__name__}.",
                remedy="Return a BatchRef from collect, for example BatchRef.concat(answers).",
            )
        return collected


def _answer_index(parts: Sequence[Tensor] | None) -> Tensor | None:
    """Where each row of the batch stands in the answers of its parts, laid end to end; None when in order."""
    if parts is None:
        return None
    index = inverse(torch.cat(list(parts)))
    return None if is_identity(index) else index


def _unknown(name: str, role: str, worker_class: type[Worker]) -> str:
    if name in dir(worker_class):
        return f"The method '{name}' of the role '{role}' is not open to the driver."
    return f"The role '{role}' has no method '{name}'."


def _nearest(name: str, specs: Mapping[str, TransferSpec]) -> str:
    known = f"Its methods: {', '.join(sorted(specs)) or 'none'}; mark a method with @transfer(...) to add it."
    return did_you_mean(name, specs) + known
