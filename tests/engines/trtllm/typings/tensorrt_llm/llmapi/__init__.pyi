# Written by tests/engines/trtllm/stubs.py from signatures.json.
from tensorrt_llm.llmapi.llm_args import CapacitySchedulerPolicy as CapacitySchedulerPolicy
from tensorrt_llm.llmapi.llm_args import CudaGraphConfig as CudaGraphConfig
from tensorrt_llm.llmapi.llm_args import KvCacheConfig as KvCacheConfig
from tensorrt_llm.llmapi.llm_args import SchedulerConfig as SchedulerConfig
