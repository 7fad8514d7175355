"""`python -m mrl ...` and the console script `mrl`: installs the signal handlers before the slow imports."""

import sys

from mrl.distributed.watchdog import signals


def main() -> int:
    """Runs the command line and returns the exit status."""
    signals.install_handlers(is_training=sys.argv[1:2] == ["train"])
    from mrl.commands.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
