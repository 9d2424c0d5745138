"""Imports of large libraries, undisturbed by the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# objects that Python freezes as it starts, at most: 3.12.1 has 375, 3.11 and 3.13 none
AT_START = 1000


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
            if gc.get_freeze_count() < AT_START:  # otherwise it is what others want to stay so
                gc.freeze()  # what was made is old at once, and not looked through
                gc.unfreeze()
            gc.enable()
