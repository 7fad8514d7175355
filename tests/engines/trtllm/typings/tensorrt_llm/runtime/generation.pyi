# Written by tests/trtllm/stubs.py from signatures.json.
from tensorrt import ICudaEngine
class _Runtime:
    engine: ICudaEngine
