"""The reward of a server: prompts and responses by HTTP, in the form that OpenRLHF's servers speak."""

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from hybridflow.errors import ConfigError, RewardError

logger = logging.getLogger(__name__)

_MOST_CONCURRENT = 8
_REMEDY = 'A server answers {"rewards": [...]} with one number, or null, for each of "query"; see docs/how_to.'


def is_address(setting: str) -> bool:
    """Whether an entry of reward.functions names servers: `http://host:port/path`, several with spaces between."""
    return setting.startswith(("http://", "https://"))


class RemoteReward:
    """POSTs `{"query", "prompts", "labels"}` and reads `{"rewards"}`, beside which `extra_logs` may stand.

    Each request goes to the next of the addresses; one that fails goes to the one after, up to `attempts` times.
    """

    def __init__(
        self,
        addresses: str,
        batch_size: int | None = None,
        request_seconds: float = 60.0,
        attempts: int = 3,
        headers: dict | None = None,
    ) -> None:
        self._addresses = addresses.split()
        self._batch_size = batch_size
        self._seconds = request_seconds
        self._attempts = attempts
        self._headers = {"Content-Type": "application/json"} | {str(k): str(v) for k, v in (headers or {}).items()}
        self._turn = 0
        for address in self._addresses:
            if not is_address(address):
                raise ConfigError(
                    f"reward.functions: '{address}' is no address.",
                    remedy="Write http://host:port/path; with several, put spaces between them.",
                )
        if attempts < 1 or not request_seconds > 0 or (batch_size is not None and batch_size < 1):
            raise ConfigError(
                f"reward.functions: settings of '{addresses}' are out of range.",
                remedy="attempts and batch_size are 1 or more, request_seconds is above 0.",
            )

    def __call__(self, queries: list[str], prompts: list[str], labels: list) -> dict[str, object]:
        """The rewards of all samples, and what the server logged beside them."""
        size = self._batch_size or max(1, len(queries))
        bodies = [
            {"query": queries[at : at + size], "prompts": prompts[at : at + size], "labels": labels[at : at + size]}
            for at in range(0, len(queries), size)
        ]
        turns = range(self._turn, self._turn + len(bodies))
        self._turn += len(bodies)
        with ThreadPoolExecutor(min(_MOST_CONCURRENT, max(1, len(bodies)))) as threads:
            answers = list(threads.map(self._answer, bodies, turns))
        rewards = list(chain.from_iterable(rewards for rewards, _ in answers))
        logs = [log for _, log in answers]
        names = [name for name in logs[0] if all(name in log for log in logs)] if logs else []
        return {"rewards": rewards, "extra_logs": {name: [v for log in logs for v in log[name]] for name in names}}

    def _answer(self, body: Mapping[str, list], turn: int) -> tuple[list, dict[str, list]]:
        """The answer of the first server, from that of this turn on, that has one."""
        found = []
        for attempt in range(self._attempts):
            address = self._addresses[(turn + attempt) % len(self._addresses)]
            try:
                return _read(self._posted(address, body), len(body["query"]))
            except (OSError, RewardError) as error:
                found.append(f"{address}: {_said(error)}")
                logger.warning("reward=%s attempt=%d of %d failed: %s", address, attempt + 1, self._attempts, found[-1])
        raise RewardError(f"No server answered. {'; '.join(dict.fromkeys(found))}", remedy=_REMEDY)

    def _posted(self, address: str, body: Mapping[str, list]) -> bytes:
        data = json.dumps(body, default=str).encode()
        request = urllib.request.Request(address, data=data, headers=self._headers, method="POST")
        with urllib.request.urlopen(request, timeout=self._seconds) as answer:
            return answer.read()


def _read(answer: bytes, num_samples: int) -> tuple[list, dict[str, list]]:
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise RewardError(f"it answered {answer[:200]!r}, which is not JSON.", remedy=_REMEDY) from error
    rewards = found.get("rewards") if isinstance(found, dict) else None
    if not isinstance(rewards, list) or len(rewards) != num_samples:
        shown = answer[:200].decode(errors="replace")
        raise RewardError(f"it answered {shown}, without 'rewards' for {num_samples} samples.", remedy=_REMEDY)
    rewards = [_alone(reward) for reward in rewards]
    logs = dict(found.get("extra_logs") or {}) | {"scores": found.get("scores")}
    whole = {str(k): v for k, v in logs.items() if isinstance(v, list) and len(v) == num_samples}
    return rewards, whole


def _alone(reward: object) -> object:
    """Some servers put each number in a list of its own."""
    return reward[0] if isinstance(reward, list) and len(reward) == 1 else reward


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        body = error.read(300).decode(errors="replace").strip()
        return f"status {error.code} {error.reason}{f', and it said: {body}' if body else ''}"
    return error.message if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"


def address_label(setting: str) -> str:
    """The short name of a server in metrics and settings: the end of its path, else its host."""
    address = setting.split()[0].split("://", 1)[1].split("?")[0].rstrip("/")
    host, _, path = address.partition("/")
    return (path.rpartition("/")[2] or host.partition(":")[0]).replace(".", "_")
