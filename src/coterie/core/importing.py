"""Large libraries: their imports undisturbed by the garbage collector, and their messages."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from coterie.core.errors import Refused

# objects that Python freezes as it starts, at most: 3.12.1 has 375, 3.11 and 3.13 none
AT_START = 1000


def check_docstrings() -> None:
    """Raise Refused under `python -OO`, where transformers cannot be imported."""
    if sys.flags.optimize > 1:
        raise Refused(
            "Python runs with -OO (PYTHONOPTIMIZE=2): transformers reads docstrings, which it "
            "removes",
            "Leave it out, or use -O (PYTHONOPTIMIZE=1).",
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector in a block or a decorated function that imports large
    libraries. It would search their many lasting objects again and again: a fifth of the time to a
    first training step.
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


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers within the block."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
