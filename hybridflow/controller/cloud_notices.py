"""Notices of clouds that this machine is about to be taken away, from the metadata service of the machine.

AWS gives two minutes, Google Cloud and Azure 30 seconds. The service answers only on machines of the cloud itself.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

logger = logging.getLogger(__name__)

_VENDOR = Path("/sys/class/dmi/id/sys_vendor")
_LOOK_SECONDS = 5.0
_TIMEOUT_SECONDS = 2.0
_MOST_FAILURES = 3
"""Failed requests after which there is no metadata service, as in a container without access to it."""

_NOT_FOUND = 404
_announced = threading.Lock()


@dataclass(frozen=True)
class Cloud:
    """A cloud: its name, the address of its metadata service, and a function that asks the service for a notice."""

    name: str
    service: str
    is_announced: Callable[[str], bool]
    """The argument is the address of the service; raises `OSError` if it does not answer."""


def _aws(service: str) -> bool:
    """Whether a spot instance has an instance-action (with IMDSv2, which needs a token)."""
    token = _answer(f"{service}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    headers = {"X-aws-ec2-metadata-token": token.decode()}
    try:
        _answer(f"{service}/latest/meta-data/spot/instance-action", headers)
    except HTTPError as error:
        if error.code == _NOT_FOUND:
            return False
        raise
    return True


def _google(service: str) -> bool:
    """Whether the instance has been preempted."""
    return _answer(f"{service}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == b"TRUE"


def _azure(service: str) -> bool:
    """Whether an event ends this machine. The service reports those of all machines of its availability set."""
    headers = {"Metadata": "true"}
    found = json.loads(_answer(f"{service}/metadata/scheduledevents?api-version=2020-07-01", headers))
    ends = [event for event in found["Events"] if event["EventType"] in ("Preempt", "Terminate")]
    if not ends:
        return False
    name = _answer(f"{service}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers).decode()
    return any(name in event["Resources"] for event in ends)


CLOUDS: Mapping[str, Cloud] = {
    "Amazon EC2": Cloud("AWS", "http://169.254.169.254", _aws),
    "Google": Cloud("Google Cloud", "http://metadata.google.internal", _google),
    "Microsoft Corporation": Cloud("Azure", "http://169.254.169.254", _azure),
}
"""Clouds by the vendor that their machines report."""


def watch_for_notice(act: Callable[[str], None], clouds: Mapping[str, Cloud] = CLOUDS, vendor: Path = _VENDOR) -> None:
    """Starts a thread that calls `act`, with the cloud's name, once this machine is about to be taken away.

    Does nothing on machines of no known cloud. `vendor` is the file in which a machine reports its vendor.
    """
    try:
        cloud = clouds.get(vendor.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return
    if cloud is not None:
        threading.Thread(target=partial(_watch, cloud, act), name="cloud notices", daemon=True).start()


def notice_of(cloud: str) -> str:
    """The notice of a cloud for this machine, in words."""
    return f"{cloud} is about to take the machine {socket.gethostname()} away"


def stop_for_notice(notice: str) -> None:
    """Stops this process's run by SIGUSR1, if it handles that; only the first call in a process has an effect."""
    if callable(signal.getsignal(signal.SIGUSR1)) and _announced.acquire(blocking=False):
        logger.warning("%s: the run saves and ends", notice)
        os.kill(os.getpid(), signal.SIGUSR1)


def _watch(cloud: Cloud, act: Callable[[str], None]) -> None:
    failures = 0
    while failures < _MOST_FAILURES:
        try:
            if cloud.is_announced(cloud.service):
                act(cloud.name)
                return
            failures = 0
        except (OSError, ValueError, KeyError) as error:
            failures += 1
            logger.debug("the metadata service of %s does not answer: %s", cloud.name, error)
        time.sleep(_LOOK_SECONDS)


def _answer(url: str, headers: Mapping[str, str], *, method: str = "GET") -> bytes:
    opener = build_opener(ProxyHandler({}))  # the service is on the machine itself
    with opener.open(Request(url, headers=dict(headers), method=method), timeout=_TIMEOUT_SECONDS) as response:
        return response.read(1 << 20)
