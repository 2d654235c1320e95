"""Ctrl-C between steps: a step that has begun is finished and saved, so that nothing of it is lost."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C only sets the event, so that a step ends and is saved; the second acts at once."""
    asked = threading.Event()

    def on_interrupt(*_) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("stopping when this step is saved; again: at once", file=sys.stderr, flush=True)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
