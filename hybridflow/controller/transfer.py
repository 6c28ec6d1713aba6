"""Marks a worker's method as one the driver may call, and says what travels to it and back."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hybridflow.batch import Batch
from hybridflow.controller.protocols import CustomProtocol, TransferProtocol
from hybridflow.controller.worker import Worker
from hybridflow.errors import ConfigError

Method = TypeVar("Method", bound=Callable)

_KEY = "transfer_spec"


@dataclass(frozen=True)
class TransferSpec:
    """How the driver calls a method: the protocol, the columns that travel to it and those it adds."""

    protocol: TransferProtocol | CustomProtocol
    requires: tuple[str, ...] = ()
    """Columns the method needs; only these and `optional` travel. Empty: all columns travel."""

    optional: tuple[str, ...] = ()
    """Columns that travel where the batch has them."""

    provides: tuple[str, ...] = ()
    """Columns the method's answer adds to its batch. Empty: it answers with something other than a batch."""

    beside: tuple[str, ...] = ()
    """Columns that further batches must have and that travel of them; they then have rows of their own, divided by
    themselves. Empty: all batches of a call have the same rows and are divided alike."""

    changes: bool = True
    """Whether the method may change what a checkpoint holds of the worker. A step that is left before such a method has
    begun leaves no trace."""

    @property
    def wanted(self) -> tuple[str, ...] | None:
        """The columns that travel; None for all."""
        return (*self.requires, *self.optional) if self.requires else None


def transfer(
    protocol: TransferProtocol | CustomProtocol,
    *,
    requires: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
    changes: bool = True,
) -> Callable[[Method], Method]:
    """Attaches a `TransferSpec` to a method; the method itself is not changed.

        @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), provides=("values",), changes=False)
        def values(self, batch: Batch) -> Batch: ...

    A method with `provides` returns a `Batch` of the rows it was given; its answer stays where it was made.
    With `changes=False` it says that it changes nothing that a checkpoint holds.
    """
    if not isinstance(protocol, TransferProtocol):
        _check_custom(protocol)
    given = {"requires": requires, "optional": optional, "provides": provides, "beside": beside}
    for word, columns in given.items():
        if not isinstance(columns, tuple) or not all(isinstance(column, str) for column in columns):
            raise ConfigError(
                f"@transfer({word}={columns!r}) is not a tuple of column names.",
                remedy=f"Write the names in a tuple: {word}=('prompt_ids',).",
            )
    spec = TransferSpec(protocol, requires, optional, provides, beside, changes)

    def attach(method: Method) -> Method:
        _check_method(method, provides)
        method.__dict__[_KEY] = spec
        return method

    return attach


def specs_of(worker_class: type[Worker]) -> dict[str, TransferSpec]:
    """The methods the driver may call; a method that overrides one without `@transfer` keeps the overridden spec."""
    specs: dict[str, TransferSpec] = {}
    for parent in reversed(worker_class.__mro__):
        for name, member in vars(parent).items():
            if inspect.isfunction(member) and _KEY in member.__dict__:
                specs[name] = member.__dict__[_KEY]
    return specs


def _check_method(method: Callable, provides: tuple[str, ...]) -> None:
    if not inspect.isfunction(method):
        raise ConfigError(
            f"@transfer stands on {method!r}, which is not a plain method.",
            remedy="Put @transfer(...) on a method of a Worker, below any other decorator.",
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ConfigError(
            f"The method '{method.__qualname__}' is a generator or a coroutine.",
            remedy="Return the whole answer at once from a method marked @transfer.",
        )
    answer = method.__annotations__.get("return")
    if answer in (Batch, "Batch") and not provides:
        raise ConfigError(
            f"The method '{method.__qualname__}' returns a Batch, but @transfer names no columns it provides.",
            remedy="Name the columns it adds: @transfer(..., provides=('values',)).",
        )


def _check_custom(protocol: object) -> None:
    lacking = [name for name in ("distribute", "collect") if not callable(inspect.getattr_static(protocol, name, None))]
    if lacking or inspect.isclass(protocol):
        raise ConfigError(
            f"@transfer({protocol!r}) is not a transfer protocol.",
            remedy="Give DATA_PARALLEL, BROADCAST, ..., a TransferProtocol(split=..., answer=...), or an object with "
            "the methods distribute(batch, mesh) and collect(answers, mesh).",
        )
