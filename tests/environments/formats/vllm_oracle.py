"""vLLM's own tool parsers, fed a whole message."""

import json

import pytest

from mrl.environments.base import ToolCall

PARSERS = {
    "hermes": ("hermes_tool_parser", "Hermes2ProToolParser"),
    "llama3_json": ("llama_tool_parser", "Llama3JsonToolParser"),
    "qwen3_coder": ("qwen3_engine_tool_parser", "Qwen3EngineToolParser"),
}
SPECIAL = ["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<|im_start|>", "<|im_end|>"]


class Tokenizer:
    """What the parsers ask of a tokenizer: its special tokens."""

    def __init__(self):
        self.all_special_tokens = SPECIAL
        self.all_special_ids = list(range(len(SPECIAL)))

    def get_vocab(self):
        return {token: number for number, token in enumerate(SPECIAL)}

    def get_added_vocab(self):
        return self.get_vocab()

    def encode(self, text, **_):
        return [self.get_vocab()[text]] if text in SPECIAL else []


def read_by_vllm(form, text, tools):
    """Content and calls."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    module, name = PARSERS[form]
    read_with = pytest.importorskip(f"vllm.tool_parsers.{module}", exc_type=ImportError)  # some need what vLLM lacks
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", tools=tools)
    parser = getattr(read_with, name)(Tokenizer(), request.tools)
    found = parser.extract_tool_calls(text, request)
    made = (ToolCall(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls)
    return found.content or "", tuple(made)
