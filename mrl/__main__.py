"""`python -m mrl ...` is the console script `mrl`."""

import sys

from mrl.cli import main

sys.exit(main())
