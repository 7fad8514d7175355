"""`rollout.name=trtllm_engine`: built TensorRT engines; see `trtllm/built.py`."""

from mrl.engines.trtllm.built import BuiltEngine

ENGINE = BuiltEngine
