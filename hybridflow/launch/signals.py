"""Signal handlers for the duration of a block; imports no large library."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """A block in which SIGINT, SIGTERM and SIGHUP call the handler with their number.

    Does nothing in a thread other than the main one; a signal that is ignored (SIGHUP under nohup) stays ignored.
    """
    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: handler(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
