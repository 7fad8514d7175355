# Written by tests/engines/trtllm/stubs.py from signatures.json.
from typing import Any
MODEL_MAP: dict[str, Any]
class PretrainedConfig:
    architecture: str
    @classmethod
    def from_json_file(cls, config_file: str) -> PretrainedConfig: ...
    logits_dtype: str
    def set_rank(self, rank: int) -> None: ...
class PretrainedModel:
    @classmethod
    def from_checkpoint(cls, ckpt_dir: str, rank: int | None = ..., config: PretrainedConfig | None = ..., *, preprocess_weights_hook: Any = ...) -> PretrainedModel: ...
