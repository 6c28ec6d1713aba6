"""Whether two processes see the same directory: one writes a token into it, which the other must find there."""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN_FILE = "driver"
PATIENCE_SECONDS = 5.0
"""The time within which a file written on another node must become visible."""


@contextmanager
def written_token(directory: Path) -> Iterator[tuple[Path, str]]:
    """A temporary directory below this one with a file that holds a token; yields the directory and the token."""
    token = secrets.token_hex(16)
    meeting = directory / f".meeting-{token[:8]}"
    meeting.mkdir()
    try:
        with (meeting / TOKEN_FILE).open("w") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        yield meeting, token
    finally:
        shutil.rmtree(meeting, ignore_errors=True)


def read_back(file: Path, token: str) -> str | None:
    """A description of the problem with a file to which another process wrote the token, if there is one.

    Waits `PATIENCE_SECONDS` for the file to appear."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return None if file.read_text() == token else f"{file} has other content than the driver's token"
        except OSError as error:
            if time.monotonic() > deadline:
                return f"{file}: {error.strerror or error}"
        time.sleep(0.1)
