from tests.engines.trtllm.signature import Fields, enum_of, flavour

if flavour() == "1.3":
    LogprobMode = enum_of("tensorrt_llm.sampling_params.LogprobMode")


class SamplingParams(Fields):
    entry = "tensorrt_llm.sampling_params.SamplingParams"

    def __init__(self, **given):
        super().__init__(**given)
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed={self.seed} is no 64-bit number")

    @property
    def is_greedy(self):
        nothing = self.temperature is None and self.top_p is None and self.top_k is None
        return nothing or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0
