# Written by tests/engines/trtllm/stubs.py from signatures.json.
from enum import Enum
from enum import StrEnum
class ExecutorMemoryType(StrEnum):
    SAMPLER = 'sampler'
    DRAFTER = 'drafter'
    GUIDED_DECODER = 'guided_decoder'
    SPEC_RESOURCES = 'spec_resource_manager'
    INIT_KV_CACHE = '_no_capture_init_kv_cache'
    INIT_EXTRA_RESOURCES = '_no_capture_init_extra_resources'
    MODEL_EXTRA = 'model_extra'
    EXTRA_RESOURCES = 'executor_extra'
    KV_CACHE = 'kv_cache'
    MODEL_ENGINE_MAIN = 'model'
    MODEL_ENGINE_DRAFT = 'draft_model'
class RestoreMode(Enum):
    NONE = 0
    CPU = 1
    PINNED = 2
    MEMSET = 3
def materialize_with_tag(*tags: str) -> None: ...
def release_with_tag(*tags: str) -> None: ...
def verify_sleep_wakeup_tags(tags_strs: list[str]) -> None: ...
