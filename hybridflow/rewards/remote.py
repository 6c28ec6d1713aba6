"""Rewards from a server: prompts and responses are sent over HTTP, with the protocol of OpenRLHF's reward servers."""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain

from hybridflow.errors import ConfigError, RewardError, RewardUnavailable
from hybridflow.observability.redaction import redacted_text
from hybridflow.rewards.requests import RequestLimits, posted, unreachable

logger = logging.getLogger(__name__)

_MOST_CONCURRENT = 8
_CONNECT_SECONDS = 5.0
_REMEDY = 'A server answers {"rewards": [...]} with a number, or null, per element of "query".'
_WHEN_DOWN = (
    "Start the server again and repeat the command, which resumes from the last checkpoint. To wait longer for a server"
    " that restarts, raise reward.settings.NAME.attempts or retry_seconds."
)


def is_address(setting: str) -> bool:
    """Whether an entry of `reward.functions` is an address `http://host:port/path`, or several separated by spaces."""
    return setting.startswith(("http://", "https://"))


class RemoteReward:
    """POSTs `{"query", "prompts", "labels"}` and reads `{"rewards"}`, optionally with `scores` and `extra_logs`.

    Requests go to the addresses in turn; one that fails goes to the next address. If all addresses are unreachable or
    overloaded, they are asked again, up to `attempts` times, after `retry_seconds` and then 4 times as long each time.
    `request_seconds` limits a whole request, from connecting to the last byte of its answer; `answer_mb` its size.
    """

    def __init__(
        self,
        addresses: str,
        batch_size: int | None = None,
        request_seconds: float = 60.0,
        attempts: int = 5,
        retry_seconds: float = 1.0,
        answer_mb: int = 64,
        headers: dict | None = None,
    ) -> None:
        self._addresses = addresses.split()
        self._batch_size = batch_size
        self._limits = RequestLimits(request_seconds, answer_mb * 2**20)
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._headers = {"Content-Type": "application/json"} | {str(k): str(v) for k, v in (headers or {}).items()}
        self._turn = 0
        _check_addresses(self._addresses)
        if min(attempts, answer_mb, batch_size or 1) < 1 or not request_seconds > 0 or not retry_seconds >= 0:
            raise ConfigError(
                f"reward.functions: settings of '{redacted_text(addresses)}' are out of range.",
                remedy="Use 1 or more for attempts, batch_size and answer_mb, more than 0 for request_seconds, and 0 or"
                " more for retry_seconds.",
            )

    def check_reachable(self) -> None:
        """Raises `ConfigError` if none of the addresses can be connected to; warns if some cannot."""
        flaws = {address: flaw for address in self._addresses if (flaw := unreachable(address, _CONNECT_SECONDS))}
        failures = "; ".join(f"{redacted_text(address)}: {flaw}" for address, flaw in flaws.items())
        if len(flaws) == len(self._addresses):
            raise ConfigError(
                f"reward.functions names a server that cannot be reached: {failures}.",
                remedy="Start it first, or correct the address; it must be reachable from this machine.",
            )
        if failures:
            logger.warning(
                "reward.functions: some servers cannot be reached yet: %s; requests go to the others", failures
            )

    def __call__(self, queries: list[str], prompts: list[str], labels: list) -> dict[str, object]:
        """The rewards of all samples, and what the servers logged."""
        size = self._batch_size or max(1, len(queries))
        bodies = [
            {"query": queries[at : at + size], "prompts": prompts[at : at + size], "labels": labels[at : at + size]}
            for at in range(0, len(queries), size)
        ]
        turns = range(self._turn, self._turn + len(bodies))
        self._turn += len(bodies)
        with ThreadPoolExecutor(min(_MOST_CONCURRENT, max(1, len(bodies)))) as threads:
            answers = list(threads.map(self._request, bodies, turns))
        rewards = list(chain.from_iterable(rewards for rewards, _ in answers))
        logs = [log for _, log in answers]
        names = [name for name in logs[0] if all(name in log for log in logs)] if logs else []
        return {"rewards": rewards, "extra_logs": {name: [v for log in logs for v in log[name]] for name in names}}

    def _request(self, body: Mapping[str, list], turn: int) -> tuple[list, dict[str, list]]:
        """Rewards and logs from the first address that answers, beginning with the one whose turn it is."""
        at = turn % len(self._addresses)
        addresses = [*self._addresses[at:], *self._addresses[:at]]
        found: list[str] = []
        for attempt in range(self._attempts):
            is_down = True
            for address in addresses:
                try:
                    return _parsed(posted(address, body, self._headers, self._limits), len(body["query"]))
                except RewardError as error:
                    is_down &= isinstance(error, RewardUnavailable)
                    found.append(f"{redacted_text(address)}: {error.message}")
                    logger.warning("reward=%s attempt=%d of %d failed", found[-1], attempt + 1, self._attempts)
            if not is_down:  # it would answer the same again
                raise RewardError(f"No server gave a usable answer. {'; '.join(dict.fromkeys(found))}", remedy=_REMEDY)
            if attempt + 1 < self._attempts:
                time.sleep(self._retry_seconds * 4**attempt)
        raise RewardUnavailable(
            f"No server answered in {self._attempts} attempts. {'; '.join(dict.fromkeys(found))}", remedy=_WHEN_DOWN
        )


def _parsed(answer: bytes, num_samples: int) -> tuple[list, dict[str, list]]:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError) as error:
        flaw = "is nested too deeply" if isinstance(error, RecursionError) else "is not JSON"
        raise RewardError(f"it answered {answer[:200]!r}, which {flaw}.", remedy=_REMEDY) from error
    rewards = found.get("rewards") if isinstance(found, dict) else None
    if not isinstance(rewards, list) or len(rewards) != num_samples:
        shown = answer[:200].decode(errors="replace")
        raise RewardError(f"it answered {shown}, without 'rewards' for {num_samples} samples.", remedy=_REMEDY)
    # Some servers wrap each number in a list.
    rewards = [reward[0] if isinstance(reward, list) and len(reward) == 1 else reward for reward in rewards]
    extra = found.get("extra_logs")
    logs = (extra if isinstance(extra, dict) else {}) | {"scores": found.get("scores")}
    whole = {str(k): v for k, v in logs.items() if isinstance(v, list) and len(v) == num_samples}
    left_out = [str(name) for name, log in logs.items() if log is not None and str(name) not in whole]
    left_out += [] if extra is None or isinstance(extra, dict) else ["extra_logs"]
    if left_out:
        _warn_of_left_out(", ".join(left_out))
    return rewards, whole


@cache
def _warn_of_left_out(names: str) -> None:
    """Warns once, because a server makes the same mistake in every answer."""
    form = "'scores' must have one value per query, and 'extra_logs' must be an object of such lists"
    logger.warning("reward server: %s left out: %s", names, form)


def _check_addresses(addresses: list[str]) -> None:
    for address in addresses:
        if not is_address(address):
            raise ConfigError(
                f"reward.functions: '{redacted_text(address)}' is not an address.",
                remedy="Write http://host:port/path; separate several with spaces.",
            )
        if "@" in address.split("://", 1)[1].partition("/")[0]:
            raise ConfigError(
                f"reward.functions: '{redacted_text(address)}' contains a name and password.",
                remedy="Send them as a header: reward.settings.NAME.headers={Authorization: ${oc.env:VARIABLE}}.",
            )


def address_label(setting: str) -> str:
    """The short name of a server in metrics and settings: the last part of its path, else its host."""
    address = setting.split()[0].split("://", 1)[1].split("?")[0].rstrip("/")
    host, _, path = address.partition("/")
    return (path.rpartition("/")[2] or host.partition(":")[0]).replace(".", "_")
