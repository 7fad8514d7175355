"""The benchmark samples the same bits with drafts as without, and says how often they came true."""

import importlib
import json

import pytest
import torch
import transformers

from mrl.config.config import load
from mrl.trainer.run_plan import resolve
from tests.source import ROOT


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("bench_speculation")


@pytest.mark.compiler
def test_text_that_repeats_is_drafted_and_other_text_is_not(tool):
    found = tool.run_case("tiny", "float32", [2], 48, 1)
    repeats, other = found["cases"]["repeats, 2 rows"], found["cases"]["random, 2 rows"]
    assert repeats["follows_frac"] > 0.9 > 0.1 > other["follows_frac"]
    assert repeats["accepted_frac"] > 0.5 and repeats["tokens_per_step"] > 1.5
    assert other["drafted_frac"] < 0.1 and other["ratio"] > 0


def test_bits_that_differ_end_the_run(tool, monkeypatch):
    bits, calls = tool.bits, []
    monkeypatch.setattr(tool, "bits", lambda rollout: calls.append(0) or (bits(rollout), len(calls)))
    with pytest.raises(RuntimeError, match="2 rows differ with drafts"):
        tool.run_case("tiny", "float32", [2], 4, 1)


WIDER = {"vocab_size": 70, "hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 3}
"""With heads of 32, as the small model has."""
ROUNDING = 1e-3
"""Nats: fp32 in other orders, with logits of order 10."""


def test_a_model_in_a_larger_shape_says_what_it_said(tool, monkeypatch):
    """Against transformers' model of the small shape; tokens that it has not are never sampled."""
    monkeypatch.setitem(tool.MODELS, "wider", WIDER)
    monkeypatch.setattr(tool, "WIDE", {"num_attention_heads": 8, "num_key_value_heads": 4})
    config = transformers.Qwen2Config(
        **tool.COPYING, **tool.SHAPE, vocab_size=len(tool.CHARACTERS), tie_word_embeddings=True, initializer_range=0.3
    )
    torch.manual_seed(0)
    small = transformers.Qwen2ForCausalLM(config)
    learned = {name: value.detach() for name, value in small.state_dict().items() if name != "lm_head.weight"}
    for name, value in learned.items():
        if "norm" in name or "bias" in name:
            value.copy_(torch.linspace(0.5, 1.5, value.numel()))
    arch = tool.arch_from_config({**tool.SHARED, **WIDER, **tool.WIDE})
    engine = tool.engine_of(arch, "float32", tool.COPIES, None, 8, 24, learned)
    prompts = [tool.Prompt(uid, tuple(ids), "") for uid, ids in enumerate(tool.prompts_of(arch, tool.COPIES, 2))]
    for rollout in engine.generate(prompts, tool.SamplingConfig(n=4, max_tokens=24, ignore_eos=True)):
        assert max(rollout.response_ids) < len(tool.CHARACTERS)
        ids = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids]])
        with torch.no_grad():
            logprobs = small(ids).logits[0, tool.PROMPT_LEN - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, tool.PROMPT_LEN :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), expected, rtol=0, atol=ROUNDING)


def test_the_training_of_the_copying_model_is_a_run_that_mrl_accepts(tool, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(tool.subprocess, "run", lambda words, check: calls.append(words))
    with pytest.raises(ValueError, match="not enough values"):  # nothing was trained
        tool.trained(tmp_path, 1)
    config, overrides = calls[0][4], calls[0][5:]
    found = resolve(load(config, overrides), 1)
    assert found.arch.head_dim == 512 // tool.WIDE["num_attention_heads"] and found.algorithm.supervised
    row = json.loads((tmp_path / "words.jsonl").read_text().splitlines()[0])
    text = row["prompt"] + row["response"]
    assert len(row["prompt"]) == tool.PROMPT_LEN and text[: -tool.CYCLE] == text[tool.CYCLE :]
