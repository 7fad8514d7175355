"""`python -m tests.engines.trtllm.one_job CONFIG ...`: runs one after the other in a rank of one job of MPI."""

import sys

if __name__ == "__main__":
    from mpi4py import MPI  # noqa: F401 -- it is this program's, and so outlives the first run

    from mrl.commands.cli import main

    sys.exit(max(main(["train", file]) for file in sys.argv[1:]))
