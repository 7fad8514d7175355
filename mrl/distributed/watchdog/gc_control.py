"""What was imported is no garbage: nobody looks for any in it, while it is imported, later, and as the process ends.

On a process of mrl that is a tenth of the time of its imports, and a second of its end.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside the block nobody looks for garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Inside the block, and as the process ends, nobody looks through what was imported before; a checkpoint would.

    Triton lists whatever is still there when the process ends as a leak, so that nothing may stay frozen beside it.
    """
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours and "triton" in sys.modules:
            gc.unfreeze()
