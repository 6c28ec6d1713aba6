"""Processes that a user's function forks and that return to our code."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_forks() -> Iterator[None]:
    """A process that is forked within the block ends when it leaves it; only the process that entered it goes on.

    Otherwise the child would share the connections of its parent and answer in its place.
    """
    owner = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != owner:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            os._exit(1)
        raise
    if os.getpid() != owner:
        os._exit(0)
