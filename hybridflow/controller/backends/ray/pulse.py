"""Liveness checks independent of calls: heartbeats of worker processes, and responses of the cluster's head.

An actor does not respond while it computes, so a pending call proves nothing. Each worker process therefore runs a
thread that writes heartbeats to the head's key-value store (GCS), and the driver runs a thread that reads them.
Heartbeats stop if the process is stopped or holds the GIL, but not while it computes or waits for another rank; they
say whether it makes progress (see `Liveness`). If the store does not respond, the head is lost; Ray itself would end
the driver after 60 s without a message.
"""

import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from hybridflow.controller.backends.ray.cluster import has_ray_ended
from hybridflow.controller.cloud_notices import notice_of, stop_for_notice, watch_for_notice
from hybridflow.controller.liveness import Beat, Liveness, read_beat
from hybridflow.observability.activity import ACTIVITY

BEAT_SECONDS = 3.0
HEAD_TIMEOUT_SECONDS = 30.0
"""Longest silence of the head: longer than its restart takes, and well below Ray's 60 s."""

_NAMESPACE = b"hybridflow"
_NOTICE = "notice"
_CALLS = "calls"
_RPC_SECONDS = 5.0


def start_beating(key: str, *, device: str) -> None:
    """Starts a thread that writes heartbeats under a key until this process ends.

    A notice that the cloud will take the machine away is passed on to the driver.
    """
    liveness = Liveness(ACTIVITY, is_device_idle_visible=device == "cpu")
    threading.Thread(target=_beat, args=(key.encode(), liveness), name="heartbeat", daemon=True).start()
    watch_for_notice(partial(_pass_on, f"{key.rpartition('-')[0]}-{_NOTICE}".encode()))


def tell_calls_sent(key: str, count: int) -> None:
    """Tells the process with this key how many calls the driver has sent it."""
    if (store := internal_kv_get_gcs_client()) is not None:
        with suppress(RayError):
            store.internal_kv_put(f"{key}-{_CALLS}".encode(), str(count).encode(), True, _NAMESPACE, _RPC_SECONDS)


def calls_sent(key: str) -> int:
    """The last count that the driver has given to the process with this key; 0 if there is none, or it is not known."""
    if (store := internal_kv_get_gcs_client()) is not None:
        with suppress(RayError):
            return int(store.internal_kv_get(f"{key}-{_CALLS}".encode(), _NAMESPACE, _RPC_SECONDS) or 0)
    return 0


@dataclass(slots=True)
class _Heart:
    """The last heartbeat of a process, how long ago the driver read it, and the number of those that it has read."""

    beat: bytes | None = None
    silent_seconds: float = 0.0
    num_beats: int = 0


class Silence:
    """For how long something that is polled every few seconds has not responded.

    Between two calls of `look`, at most two polling intervals count: a driver that was stopped and resumed polled
    nothing in between.
    """

    def __init__(self, now: float) -> None:
        self._answered_at = self._looked_at = now
        self._seconds = 0.0

    def look(self, answered_at: float, now: float) -> float:
        """The seconds of silence until `now`; `answered_at` is the time of the last response, on the same clock."""
        if answered_at > self._answered_at:
            self._answered_at, self._seconds = answered_at, 0.0
        self._seconds += min(now - max(self._looked_at, answered_at), 2 * BEAT_SECONDS)
        self._looked_at = now
        return self._seconds


class Pulse:
    """The driver's thread that reads the heartbeats. Its methods return the latest results without waiting."""

    def __init__(self) -> None:
        self.head = ray.get_runtime_context().gcs_address
        self._prefix = f"beat-{uuid.uuid4().hex}-"
        self._hearts: dict[str, _Heart] = {}
        self._answered_at = time.monotonic()
        self._silence = Silence(self._answered_at)
        self._is_closed = threading.Event()
        threading.Thread(target=self._look, name="pulse", daemon=True).start()

    def new_key(self) -> str:
        """A new key, for a process that is about to start."""
        key = f"{self._prefix}{len(self._hearts)}"
        self._hearts[key] = _Heart()
        return key

    def silent_seconds(self, key: str) -> float:
        """For how long a process has sent no heartbeat; 0 before its first."""
        heart = self._hearts[key]
        return heart.silent_seconds if heart.beat is not None else 0.0

    def num_beats(self, key: str) -> int:
        """The number of heartbeats of a process that the driver has read."""
        return self._hearts[key].num_beats

    def beat(self, key: str) -> Beat | None:
        """The last heartbeat of a process, if it executes a call."""
        beat = self._hearts[key].beat
        return None if beat is None else read_beat(beat)

    def head_silent_seconds(self) -> float:
        """For how long the cluster's head has not responded."""
        return self._silence.look(self._answered_at, time.monotonic())

    def is_head_lost(self) -> bool:
        """Whether the head has been silent for too long, or Ray has ended on this machine."""
        return has_ray_ended() or self.head_silent_seconds() > HEAD_TIMEOUT_SECONDS

    def close(self) -> None:
        """Stops the thread, and deletes the heartbeats if the head responds."""
        self._is_closed.set()
        store = internal_kv_get_gcs_client()
        if store is not None and not self.is_head_lost():
            with suppress(RayError):
                store.internal_kv_del(self._prefix.encode(), True, _NAMESPACE, _RPC_SECONDS)

    def _look(self) -> None:
        while not self._is_closed.wait(BEAT_SECONDS) and (store := internal_kv_get_gcs_client()) is not None:
            hearts = dict(self._hearts)
            keys = [key.encode() for key in hearts]
            try:
                notice = f"{self._prefix}{_NOTICE}".encode()
                counts = store.internal_kv_multi_get([*keys, notice, b"head"], _NAMESPACE, _RPC_SECONDS)
            except RayError:
                continue
            if notice in counts:
                stop_for_notice(counts[notice].decode())
            now = time.monotonic()
            # At most two intervals count against a process, however long this thread or the head was silent.
            passed, self._answered_at = min(now - self._answered_at, 2 * BEAT_SECONDS), now
            for key, heart in zip(keys, hearts.values(), strict=True):
                count = counts.get(key)
                heart.num_beats += count != heart.beat
                heart.silent_seconds = heart.silent_seconds + passed if count == heart.beat else 0.0
                heart.beat = count


def _beat(key: bytes, liveness: Liveness) -> None:
    while (store := internal_kv_get_gcs_client()) is not None:
        with suppress(RayError):
            store.internal_kv_put(key, liveness.beat(), True, _NAMESPACE, _RPC_SECONDS)
        time.sleep(BEAT_SECONDS)


def _pass_on(key: bytes, cloud: str) -> None:
    """Stores a notice, which the driver reads together with the counters."""
    if (store := internal_kv_get_gcs_client()) is not None:
        text = notice_of(cloud).encode()
        with suppress(RayError):
            store.internal_kv_put(key, text, True, _NAMESPACE, _RPC_SECONDS)
