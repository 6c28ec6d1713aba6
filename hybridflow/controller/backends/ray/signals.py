"""The driver's own handler of SIGTERM, which Ray replaces when it starts and removes when it shuts down."""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGACTION_BYTES = 512
"""More than a `struct sigaction` has on any platform."""

_LOOK_SECONDS = 0.01


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keeps this process's SIGTERM handler: Ray's handler would end the driver immediately."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keeps the handler while Ray shuts down, at some point of which it restores the default of the system.

    Python would not notice: it calls a handler only if the C library has its own.
    """
    library, kept, is_over = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES), threading.Event()
    library.sigaction(signal.SIGTERM, None, kept)

    def keep() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            library.sigaction(signal.SIGTERM, kept, None)

    thread = threading.Thread(target=keep, name="keep SIGTERM", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        library.sigaction(signal.SIGTERM, kept, None)
