"""Nobody looks for garbage in what was imported, and the collector is left as it was."""

import gc
import sys
from types import ModuleType

import pytest

from mrl.distributed.watchdog import gc_control


@pytest.mark.parametrize("enabled", [True, False])
def test_nobody_looks_for_garbage_while_modules_are_imported(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), gc_control.gc_disabled():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("was_frozen", [True, False])
def test_nothing_stays_frozen_beside_triton_which_would_list_it_as_leaks(is_there, was_frozen, monkeypatch):
    if is_there:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    gc.unfreeze()
    if was_frozen:
        gc.freeze()
    with gc_control.gc_frozen():
        assert gc.get_freeze_count()
    try:
        assert bool(gc.get_freeze_count()) == (was_frozen or not is_there)
    finally:
        gc.freeze()  # as the tests begin
