"""`mrl convert hf-to-hf` as a script, with the same flags and exit statuses."""

import sys

from mrl.commands.convert.converters import run_as_tool

if __name__ == "__main__":
    sys.exit(run_as_tool("hf-to-hf"))
