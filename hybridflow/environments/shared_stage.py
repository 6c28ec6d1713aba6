"""The episodes of a replica that several ranks hold together: one rank runs them, and all of them get their events."""

import json
from collections.abc import Mapping

from hybridflow.environments.hosting import event_of, packed
from hybridflow.environments.interface import Ask, Event, Failed, Finished, Request
from hybridflow.environments.stages import Stage
from hybridflow.errors import EpisodeError, HybridflowError, error_from, error_text
from hybridflow.parallel.collectives import broadcast_bytes
from hybridflow.parallel.groups import Ranks

RECEIVE_SECONDS = 60.0
"""How long the first rank waits for events before it sends a message without any: collectives have a time limit.

With `environment.processes=0`, the wait for a step of an environment cannot be cut short: it must not reach that limit.
"""

_AXES = "pipeline", "tensor"


def shared_stage(stage: Stage, ranks: Ranks) -> Stage:
    """A stage for all ranks of this rank's replica; the given one if there are no others. All ranks call it."""
    return stage if ranks.mesh.count_along(_AXES) == 1 else SharedStage(stage, ranks)


class SharedStage:
    """A `Stage` on every rank of a replica; episodes run on the stage of the first rank.

    The others receive the events from it, so that all ranks play the same conversations, and call their engine alike.
    Every rank makes the same calls in the same order. An error of the first rank's stage is raised by `receive`, on
    all ranks.
    """

    def __init__(self, stage: Stage, ranks: Ranks) -> None:
        group = ranks.group(*_AXES)
        assert group is not None, "a replica of one rank"
        self._stage = stage
        self._group = group
        self._is_first = group.rank() == 0
        self.places = None if stage.places is None else ranks.maximum(stage.places if self._is_first else 0, *_AXES)
        self._acting: set[int] = set()
        """Episodes whose next event has not arrived."""

        self._failure: Exception | None = None
        """The error of the first rank's stage."""

    def send(self, requests: Mapping[int, Request]) -> None:
        self._acting.update(requests)
        if self._is_first:
            try:
                self._stage.send(requests)
            except Exception as error:  # noqa: BLE001 (`receive` raises it)
                self._failure = error

    def receive(self, *, seconds: float) -> dict[int, Event]:
        """Events since the last call. It may return without any before the time is over."""
        if not self._acting:
            return {}
        own = self._message(min(seconds, RECEIVE_SECONDS)) if self._is_first else b""
        message = broadcast_bytes(own, self._group, source=0).decode()  # the first rank declares its waits
        found = json.loads(message)
        if isinstance(found, dict):
            raise self._failure or error_from(message)
        events: dict[int, Event] = {}
        for number, content in found:
            event = event_of(content.encode())
            assert isinstance(event, Ask | Finished | Failed), f"{event} from an episode"
            events[number] = event
        self._acting -= events.keys()
        return events

    def excuse(self, seconds: float) -> None:
        if self._is_first:
            self._stage.excuse(seconds)

    def abandon(self) -> None:
        self._acting.clear()
        self._failure = None
        self._stage.abandon()

    def close(self) -> None:
        self._stage.close()

    def _message(self, seconds: float) -> bytes:
        """The message to all ranks: a list of events, or an error."""
        try:
            if self._failure is not None:
                raise self._failure
            events = self._stage.receive(seconds=seconds)
            return json.dumps([[number, packed(event).decode()] for number, event in events.items()]).encode()
        except Exception as error:  # noqa: BLE001 (`receive` raises it)
            self._failure = error
            return error_text(_ours(error)).encode()


def _ours(error: Exception) -> HybridflowError:
    if isinstance(error, HybridflowError):
        return error
    return EpisodeError(
        f"The rank that runs the episodes of this replica failed: {type(error).__name__}: {error}.",
        remedy="See the log of that rank.",
    )
