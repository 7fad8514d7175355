# Written by tests/engines/trtllm/stubs.py from signatures.json.
from torch import Tensor
from torch.nn import Module
class FP8BlockScalesLinearMethod:
    def load_weights_vanilla(self, module: Module, weights: list[dict[str, Tensor]], allow_partial_loading: bool = ...) -> None: ...
