"""Marks the methods of workers that the driver may call, and declares which columns travel to them and back."""

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
    """How the driver calls a method: the protocol, the columns that it receives, and the columns it adds."""

    protocol: TransferProtocol | CustomProtocol
    requires: tuple[str, ...] = ()
    """Columns the method needs; it receives only these and `optional`. Empty: all columns.

    They travel with the other columns that the same calls have provided."""

    optional: tuple[str, ...] = ()
    """Columns that the method receives if the batch has them."""

    provides: tuple[str, ...] = ()
    """Columns that the answer adds to the batch. Empty: the method returns something other than a batch."""

    other_requires: tuple[str, ...] = ()
    """Columns that batches after the first must have; the method receives only these. These batches have rows of their
    own, which are divided separately. Empty: all batches of a call have the same rows and are divided the same way."""

    changes: bool = True
    """Whether the method may change what a checkpoint holds of the worker. A step that is abandoned before such a
    method begins leaves no trace."""

    keeps_rows: bool = True
    """Whether the answer has the rows of the batch that the method was given. Otherwise its rows are its own."""

    yields: bool = False
    """Whether the method returns early when its process has been sent another call (`WorkerContext.is_awaited`)."""

    def columns_of(self, position: int) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """The columns of a call's batch (0 for the first) that it receives (None: all), and those that it must have."""
        if position and self.other_requires:
            return self.other_requires, self.other_requires
        return (*self.requires, *self.optional) if self.requires else None, self.requires


def transfer(
    protocol: TransferProtocol | CustomProtocol,
    *,
    requires: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    other_requires: tuple[str, ...] = (),
    changes: bool = True,
    keeps_rows: bool = True,
    yields: bool = False,
) -> Callable[[Method], Method]:
    """Attaches a `TransferSpec` to a method; the method itself is not changed.

        @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), provides=("values",), changes=False)
        def values(self, batch: Batch) -> Batch: ...

    A method with `provides` returns a `Batch` with the rows it was given, or with `keeps_rows=False` with rows of its
    own; the answer stays where it was made. With `yields`, it returns early when its process has been sent other calls.
    `changes=False` promises that the method changes nothing that a checkpoint holds.
    """
    if not isinstance(protocol, TransferProtocol):
        _check_custom(protocol)
    given = {"requires": requires, "optional": optional, "provides": provides, "other_requires": other_requires}
    for word, columns in given.items():
        if not isinstance(columns, tuple) or not all(isinstance(column, str) for column in columns):
            raise ConfigError(
                f"@transfer({word}={columns!r}) is not a tuple of column names.",
                remedy=f"Write the names in a tuple: {word}=('prompt_ids',).",
            )
    spec = TransferSpec(protocol, requires, optional, provides, other_requires, changes, keeps_rows, yields)

    def attach(method: Method) -> Method:
        _check_method(method, provides)
        method.__dict__[_KEY] = spec
        return method

    return attach


def specs_of(worker_class: type[Worker]) -> dict[str, TransferSpec]:
    """The methods that the driver may call; an overriding method without `@transfer` keeps the overridden spec."""
    specs: dict[str, TransferSpec] = {}
    for parent in reversed(worker_class.__mro__):
        for name, member in vars(parent).items():
            if inspect.isfunction(member) and _KEY in member.__dict__:
                specs[name] = member.__dict__[_KEY]
    return specs


def _check_method(method: Callable, provides: tuple[str, ...]) -> None:
    if not inspect.isfunction(method):
        raise ConfigError(
            f"@transfer is applied to {method!r}, which is not a plain method.",
            remedy="Put @transfer(...) on a method of a Worker, below any other decorator.",
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ConfigError(
            f"The method '{method.__qualname__}' is a generator or a coroutine.", remedy="Return the whole result."
        )
    answer = method.__annotations__.get("return")
    if answer in (Batch, "Batch") and not provides:
        raise ConfigError(
            f"The method '{method.__qualname__}' returns a Batch, but @transfer names no columns that it provides.",
            remedy="Name the columns it adds: @transfer(..., provides=('values',)).",
        )


def _check_custom(protocol: object) -> None:
    lacking = [name for name in ("distribute", "collect") if not callable(inspect.getattr_static(protocol, name, None))]
    if lacking or inspect.isclass(protocol):
        raise ConfigError(
            f"@transfer({protocol!r}) is not a transfer protocol.",
            remedy="Pass DATA_PARALLEL, BROADCAST, ..., a TransferProtocol(split=..., answer=...), or an object with "
            "the methods distribute(batch, mesh) and collect(answers, mesh).",
        )
