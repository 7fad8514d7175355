# Written by tests/engines/trtllm/stubs.py from signatures.json.
from torch import Tensor
from torch.nn import Module
class ModelLoader:
    def reload(self, model: Module, weights: dict[str, Tensor], allow_partial_loading: bool = ...) -> None: ...
