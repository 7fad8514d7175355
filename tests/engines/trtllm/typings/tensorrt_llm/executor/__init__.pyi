# Written by tests/engines/trtllm/stubs.py from signatures.json.

