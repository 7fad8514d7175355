# Written by tests/engines/trtllm/stubs.py from signatures.json.
from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader
from torch.nn import Module
class PyTorchModelEngine:
    model: Module
    model_loader: ModelLoader
