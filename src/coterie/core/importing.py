"""Imports of large libraries, undisturbed by the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running within the block, or within a function that this
    decorates.

    Imports of torch and transformers make hundreds of thousands of objects that stay. The collector
    would look through them again and again: a fifth of the time until a first training step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what was made is old at once, and not looked through
                gc.freeze()
                gc.unfreeze()
            gc.enable()
