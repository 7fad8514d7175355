# Written by tests/engines/trtllm/stubs.py from signatures.json.
from contextlib import AbstractContextManager
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from threading import Thread
from typing import Any
class PyExecutor:
    def control_action(self) -> AbstractContextManager[Any]: ...
    is_shutdown: bool
    model_engine: PyTorchModelEngine
    def reset_prefix_cache(self) -> None: ...
    worker_thread: Thread
