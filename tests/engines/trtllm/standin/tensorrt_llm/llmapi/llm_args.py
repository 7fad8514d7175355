from tests.engines.trtllm.signature import Fields, enum_of, flavour, parameters, signed

HOME = "tensorrt_llm.llmapi.llm_args."
CapacitySchedulerPolicy = enum_of(HOME + "CapacitySchedulerPolicy")
ContextChunkingPolicy = enum_of(HOME + "ContextChunkingPolicy")


def fields_of(entry):
    """What pydantic calls `model_fields`."""
    return {item["name"]: item for item in parameters(entry)}


class KvCacheConfig(Fields):
    entry = HOME + "KvCacheConfig"
    model_fields = fields_of(entry)


class CudaGraphConfig(Fields):
    entry = HOME + "CudaGraphConfig"
    model_fields = fields_of(entry)

    def __init__(self, **given):
        super().__init__(**given)
        if self.batch_sizes and self.max_batch_size:
            raise ValueError("Please don't set both cuda_graph_config.batch_sizes and cuda_graph_config.max_batch_size")


class SchedulerConfig(Fields):
    entry = HOME + "SchedulerConfig"
    model_fields = fields_of(entry)


class MoeConfig(Fields):
    entry = HOME + "MoeConfig"
    model_fields = fields_of(entry)

    def __init__(self, **given):
        super().__init__(**given)
        if self.backend not in ("CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"):
            raise ValueError(f"1 validation error for MoeConfig\nbackend\n  {self.backend!r} is none of its values")


class NGramDecodingConfig(Fields):
    entry = HOME + "NGramDecodingConfig"


class DecodingBaseConfig:
    @staticmethod
    @signed(HOME + "DecodingBaseConfig.from_dict")
    def from_dict(data):
        if data.get("decoding_type") != "NGram":
            raise ValueError(f"Invalid decoding type: {data.get('decoding_type')}")
        data.pop("decoding_type")
        return NGramDecodingConfig(**data)


class TorchLlmArgs(Fields):
    entry = HOME + "TorchLlmArgs"
    model_fields = fields_of(entry)

    def __init__(self, **given):
        super().__init__(**{"kv_cache_config": KvCacheConfig(), "load_format": "auto", **given})
        if self.attn_backend not in ("TRTLLM", "FLASHINFER", "FLASHINFER_STAR_ATTENTION", "VANILLA"):
            raise AssertionError(f"attn_backend {self.attn_backend!r}: TRTLLM's would be taken in silence")


if flavour() == "1.3":
    ExecutorMemoryType = enum_of(HOME + "ExecutorMemoryType")

    class SleepConfig(Fields):
        entry = HOME + "SleepConfig"

        def __init__(self, **given):
            super().__init__(**given)
            for tag, mode in self.restore_modes.items():
                if tag not in list(ExecutorMemoryType) or mode not in ("NONE", "CPU", "PINNED", "MEMSET"):
                    raise ValueError(f"restore_modes: {tag!r}: {mode!r}")
