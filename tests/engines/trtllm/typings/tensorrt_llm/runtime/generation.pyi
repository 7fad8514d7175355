# Written by tests/engines/trtllm/stubs.py from signatures.json.
from tensorrt import ICudaEngine
class _Runtime:
    engine: ICudaEngine
