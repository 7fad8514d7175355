# Written by tests/trtllm/stubs.py from signatures.json.
from enum import Enum
from typing import Any

class DataType(Enum):
    FLOAT = 0
    HALF = 1
    BF16 = 7

class ICudaEngine:
    refittable: bool

class Logger:
    ERROR: Any
    def __init__(self, min_severity: Any = ...) -> None: ...

class Refitter:
    def __init__(self, engine: ICudaEngine, logger: Logger) -> None: ...
    def get_all_weights(self) -> list[str]: ...
    def get_missing_weights(self) -> list[str]: ...
    def get_weights_prototype(self, weights_name: str) -> Weights: ...
    def refit_cuda_engine(self) -> bool: ...
    def set_named_weights(self, name: str, weights: Weights, location: TensorLocation) -> bool: ...

class TensorLocation(Enum):
    DEVICE = 0
    HOST = 1

class Weights:
    def __init__(self, type: DataType, ptr: int, count: int) -> None: ...
    dtype: DataType
    size: int
