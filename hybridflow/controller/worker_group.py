"""The workers of a role, as the driver calls them.

A call takes four steps: `dispatched` divides its batches into a portion per rank, the backend sends each rank its
arguments, the `WorkerHost` of the rank runs the method, and the answers come back as a `BatchRef` or a `Future`.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

from hybridflow.config.nearest import did_you_mean
from hybridflow.controller.backends.interface import Backend, Handle, Pending
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.dispatch import Dispatch, Method, dispatched
from hybridflow.controller.futures import Future, combined, received
from hybridflow.controller.protocols import TransferProtocol
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.transfer import specs_of
from hybridflow.controller.worker import Worker, WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm
from hybridflow.errors import ConfigError, WorkerDied
from hybridflow.parallel import ParallelMesh

RoleMethod = Callable[..., Future | BatchRef]
Linked = tuple[Sequence[Handle], RoleMethod]
"""The workers of another group, and the method of theirs that is called too."""


class WorkerGroup:
    """A worker on each device of a pool, called together. Every method marked `@transfer` is a method of the group.

    `minibatch_rows` is how many rows an optimizer step takes, for methods with the protocol MINIBATCHES.
    A call returns immediately: a `BatchRef` if the method provides columns (the given batch with these columns),
    else a `Future` of the answers, combined (see `futures.combined`).

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
        for name, size in {"training mesh": mesh.size, "generation mesh": (generation_mesh or mesh).size}.items():
            if size != pool.devices:
                raise ConfigError(
                    f"The {name} of '{role}' has {size} ranks, but pool '{pool.name}' has {pool.devices} devices.",
                    remedy="The product of the role's parallel sizes must be the number of devices of its pool.",
                )
        self.role = role
        self.worker_class = worker_class
        self.pool = pool
        self.backend = backend
        self.minibatch_rows = minibatch_rows
        self.meshes = {"training": mesh, "generation": generation_mesh or mesh}
        self._linked: dict[str, Linked] = {}
        self._renamed: Mapping[str, str] = {}
        self._methods: dict[str, RoleMethod] = {}
        self._specs = specs_of(worker_class)
        self.handles: Sequence[Handle] = ()
        taken = [name for name in self._specs if name in dir(self)]
        if taken:
            raise ConfigError(
                f"{worker_class.__name__}'s methods {taken} have names that WorkerGroup itself uses.",
                remedy="Rename the methods.",
            )
        self.handles = backend.spawn(WorkerSpec(role, worker_class, mesh, generation_mesh, kwargs or {}), pool)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.handles)

    def view(self, role: str, *, methods: Mapping[str, str] | None = None) -> "WorkerGroup":
        """The same workers under another role's name, which errors then use.

        `methods` maps names of the role's methods to the workers' own names for them.
        """
        view = copy(self)
        view.role = role
        view.handles = [replace(handle, role=role) for handle in self.handles]
        view._renamed = methods or {}
        view._methods = {}
        return view

    def link(self, name: str, other: "WorkerGroup", other_name: str) -> None:
        """Makes every call of the method `name` also call another group's method, with the same arguments.

        For operations of two pools, such as sending and receiving weights; the result is this group's. If a process of
        either group is known to have ended, neither is called: the next call of that group raises its error.
        """
        self._linked[name] = other.handles, other.__getattr__(other_name)

    def kill(self) -> None:
        """Ends the processes of this group, with all workers in them."""
        self.backend.kill(self.handles)

    def __getattr__(self, name: str) -> RoleMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._methods:
            own_name = self._renamed.get(name, name)
            if own_name not in self._specs:
                raise self._unknown(name)
            method = Method(self.role, own_name, self._specs[own_name], self.meshes, self.minibatch_rows)
            self._methods[name] = _BoundMethod(method, self.handles, self.backend, self._linked)
        return self._methods[name]

    def _unknown(self, name: str) -> ConfigError:
        known = f"Its methods: {', '.join(sorted(self._specs)) or 'none'}; mark a method with @transfer(...) to add it."
        found = f"The role '{self.role}' has no method '{name}'."
        if name in dir(self.worker_class):
            found = f"The driver cannot call the method '{name}' of the role '{self.role}'."
        return ConfigError(found, remedy=did_you_mean(name, self._specs) + known)


class _BoundMethod:
    """A method of a group: sends its calls to all ranks and combines their answers."""

    def __init__(
        self, method: Method, handles: Sequence[Handle], backend: Backend, linked: Mapping[str, Linked]
    ) -> None:
        self._method = method
        self._handles = handles
        self._backend = backend
        self._linked = linked
        self._answering = set(method.answering)

    def __call__(self, *args: object, **kwargs: object) -> Future | BatchRef:
        method, spec = self._method, self._method.spec
        linked = self._linked.get(method.name)
        if linked is not None:
            try:
                self._backend.check_alive([*self._handles, *linked[0]])
            except WorkerDied:
                return Future([], self._backend, lambda values: None)
        dispatch = dispatched(method, args, kwargs, self._backend)
        number = self._number(dispatch)
        updates = isinstance(spec.protocol, TransferProtocol) and spec.protocol.by_minibatch
        form = VALUE._replace(updates=updates)
        if spec.provides or not spec.changes:
            keeps_rows = dispatch.batch is not None and spec.keeps_rows
            form = AnswerForm(True, list(spec.provides), keeps_rows, spec.changes, spec.yields, updates)
        dropped = AnswerForm(False, [], changes=spec.changes, yields=spec.yields, updates=updates)
        calls = [
            self._backend.call(
                handle, method.name, arguments, form if handle.rank in self._answering else dropped, number
            )
            for handle, arguments in zip(self._handles, dispatch.arguments, strict=True)
        ]
        if spec.provides:
            return self._reference(dispatch, [calls[rank] for rank in method.answering])
        return self._future(calls, [] if linked is None else linked[1](*args, **kwargs).pending())

    def _number(self, dispatch: Dispatch) -> int:
        method, pool = self._method, self._handles[0].pool.name
        parts = {id(arguments): arguments.takes for arguments in dispatch.arguments}
        takes = frozenset().union(*parts.values())
        return self._backend.call_log.begin(
            method.role, method.name, pool, takes=takes, ranks=len(self._handles), answering=self._answering
        )

    def _future(self, calls: Sequence[Pending], linked: Sequence[Pending]) -> Future:
        method, protocol = self._method, self._method.spec.protocol

        def combine(values: Sequence[object]) -> object:
            answers = [values[rank] for rank in method.answering]
            if isinstance(protocol, TransferProtocol):
                return combined(answers)
            return protocol.collect([received(answer) for answer in answers], method.mesh)

        return Future([*calls, *linked], self._backend, combine)

    def _reference(self, dispatch: Dispatch, answers: Sequence[Pending]) -> BatchRef:
        provides, protocol = self._method.spec.provides, self._method.spec.protocol
        if isinstance(protocol, TransferProtocol):
            if dispatch.batch is not None and self._method.spec.keeps_rows:
                return dispatch.batch.with_answers(answers, provides, dispatch.parts)
            return BatchRef.of_answers(answers, provides, self._backend)
        refs = [
            BatchRef.of_answers([answer], provides, self._backend)
            if dispatch.rank_batches is None
            else dispatch.rank_batches[rank].with_answers([answer], provides, None)
            for rank, answer in enumerate(answers)
        ]
        collected = protocol.collect(refs, self._method.mesh)
        if not isinstance(collected, BatchRef):
            raise ConfigError(
                f"The protocol of '{self._method}' collected an object of type {type(collected).__name__}.",
                remedy="Return a BatchRef from collect, for example BatchRef.concat(answers).",
            )
        return collected
