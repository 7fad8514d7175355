"""Importing it puts the hooks in place, in this process and in the ranks that it forks.

pytest -p tests.megatron.te.active tests/megatron/test_model.py      # any test of the actor, with Megatron's TE spec
"""

from tests import imports
from tests.megatron.te import hooks

hooks.install()
imports.PRELOAD.insert(0, __name__)
