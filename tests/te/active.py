"""Importing it puts the hooks in place, in this process and in the ranks that it forks.

pytest -p tests.te.active tests/megatron/test_model.py      # any test of the actor, with Megatron's TE spec
"""

from tests import ranks
from tests.te import hooks

hooks.install()
ranks.PRELOAD = (__name__, *ranks.PRELOAD)
