from tests.trtllm.signature import Fields, enum_of, flavour, parameters

HOME = "tensorrt_llm.llmapi.llm_args."
CapacitySchedulerPolicy = enum_of(HOME + "CapacitySchedulerPolicy")


class KvCacheConfig(Fields):
    entry = HOME + "KvCacheConfig"


class CudaGraphConfig(Fields):
    entry = HOME + "CudaGraphConfig"


class SchedulerConfig(Fields):
    entry = HOME + "SchedulerConfig"


class TorchLlmArgs(Fields):
    entry = HOME + "TorchLlmArgs"
    model_fields = {item["name"]: item for item in parameters(HOME + "TorchLlmArgs")}  # noqa: RUF012

    def __init__(self, **given):
        super().__init__(**{"kv_cache_config": KvCacheConfig(), "load_format": "auto", **given})


if flavour() == "1.3":
    ExecutorMemoryType = enum_of(HOME + "ExecutorMemoryType")

    class SleepConfig(Fields):
        entry = HOME + "SleepConfig"

        def __init__(self, **given):
            super().__init__(**given)
            for tag, mode in self.restore_modes.items():
                if tag not in list(ExecutorMemoryType) or mode not in ("NONE", "CPU", "PINNED", "MEMSET"):
                    raise ValueError(f"restore_modes: {tag!r}: {mode!r}")
