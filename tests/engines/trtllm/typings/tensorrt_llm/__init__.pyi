# Written by tests/engines/trtllm/stubs.py from signatures.json.
__version__: str
from tensorrt_llm.llmapi.llm import LLM as LLM
from tensorrt_llm.sampling_params import SamplingParams as SamplingParams
