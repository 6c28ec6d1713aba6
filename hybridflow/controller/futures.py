"""Futures of calls, and waiting for them."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

from hybridflow.controller.backends.interface import Backend, Pending
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.observability.metrics import Metrics, SentMetrics, is_metrics, merge, merge_sent

Answer = TypeVar("Answer", covariant=True)


class Future(Generic[Answer]):
    """The answer of a role's method. `result()` waits for it, and raises the first failure of any call."""

    def __init__(
        self, calls: Sequence[Pending], backend: Backend, combine: Callable[[Sequence[object]], Answer]
    ) -> None:
        self._calls = calls
        self._backend = backend
        self._combine = combine
        self._answer: list[Answer] = []

    @property
    def backend(self) -> Backend:
        """The backend on which the calls run."""
        return self._backend

    def pending(self) -> Sequence[Pending]:
        """The calls that it waits for: one per rank."""
        return [] if self._answer else self._calls

    def result(self) -> Answer:
        """The answer of all ranks, combined as the method's transfer protocol says."""
        if not self._answer:
            self._answer.append(self._combine(self._backend.wait(self._calls)))
        return self._answer[0]


@overload
def wait(*futures: Future[Metrics]) -> Metrics: ...
@overload
def wait(*futures: Future | BatchRef) -> object: ...
def wait(*futures: Future | BatchRef) -> object:
    """Waits for all: merged metrics if all answers are metrics, else a tuple of answers (a single answer as it is).

    All calls of the backend are watched meanwhile, and nothing hangs: the first failure is raised at once or, if it is
    in another pool while an awaited call updates a model, after that call.
    """
    for backend in {id(future.backend): future.backend for future in futures}.values():
        backend.wait([call for future in futures if future.backend is backend for call in future.pending()])
    answers = tuple(future.result() for future in futures)
    sets = [answer for answer in answers if is_metrics(answer)]
    if len(sets) == len(answers):
        return merge(sets)
    return answers[0] if len(answers) == 1 else answers


def combined(answers: Sequence[object]) -> object:
    """The answers of all ranks as one: a single answer as it is, merged metrics, None if all are None, else a list."""
    if len(answers) == 1:
        return received(answers[0])
    sent = [answer for answer in answers if isinstance(answer, SentMetrics)]
    if len(sent) == len(answers):
        return merge_sent(sent)
    return None if all(answer is None for answer in answers) else [received(answer) for answer in answers]


def received(answer: object) -> object:
    """The answer of a rank, as its method returned it."""
    return answer.received() if isinstance(answer, SentMetrics) else answer
