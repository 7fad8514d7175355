"""The embedded engine, plain PyTorch on the training ranks themselves; see `engine.py`."""

from mrl.engines.native.engine import NativeEngine

ENGINE = NativeEngine
