# Written by tests/trtllm/stubs.py from signatures.json.

