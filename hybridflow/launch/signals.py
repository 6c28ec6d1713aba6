"""Signal handlers for the duration of a block; imports no large library."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridflow.process import STOP_SIGNALS


@contextmanager
def on_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """A block in which the signals that stop a command call the handler with their number.

    Does nothing in a thread other than the main one; a signal that is ignored (SIGHUP under nohup) stays ignored.
    """
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: handler(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
