"""vLLM samples with low-rank adapters that weight sync writes beside its weights."""

import os

import pytest
import torch
from safetensors.torch import save_file

from mrl.checkpoint.formats.hf import SINGLE, write_metadata_files
from mrl.config.config import LoraConfig
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf import hf_layout
from mrl.trainer.hf_export import write_adapters
from tests.e2e.test_layouts import assert_same
from tests.e2e.test_lora import BESIDE, LARGE, check, trained, without_costs
from tests.megatron.actors import VOCAB, fill_adapters, full_weights, make_batch, make_policy
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

ADAPTERS = LoraConfig(rank=4, alpha=8.0)
VLLM = [
    "rollout.name=vllm", "rollout.gpu_memory_utilization=0.02", "model.overrides.hidden_size=64",
    "model.overrides.num_attention_heads=2", "model.overrides.num_key_value_heads=1",
]  # fmt: skip


@pytest.mark.parametrize(
    "settings", [[BESIDE], [BESIDE, "actor.lora.target_modules=[q_proj, v_proj, up_proj]"]], ids=str
)
def test_vllm_samples_with_adapters_beside_the_weights(settings, tmp_path):
    expected = trained(tmp_path / "merged", [*LARGE, *VLLM, *settings, "actor.lora.merge=true"], 1)
    found = trained(tmp_path / "beside", [*LARGE, *VLLM, *settings], 1)
    for rows in (expected, found):
        check(rows)
    assert_same(without_costs(found), without_costs(expected))
    layout = ["parallel.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"]
    moved = trained(tmp_path / "two", [*LARGE, *VLLM, *settings, *layout], 2)
    check(moved)
    assert_same(without_costs(moved), without_costs(expected))


ARCH = arch_from_preset("qwen2_tiny", {"num_attention_heads": 2, "num_key_value_heads": 1}, VOCAB)


def exported(folder):
    """A model and its adapters as folders; log-probabilities of a batch by the actor."""
    policy = make_policy(ARCH, ParallelLayout(1), actor={"lora": ADAPTERS})
    fill_adapters(policy)
    layouts = {0: policy.adapters.layout()}
    write_adapters(folder / "adapter", ARCH, ADAPTERS, layouts, policy.trained_tensors(), base="model")
    weights = full_weights(policy)
    (folder / "model").mkdir()
    save_file(weights, folder / "model" / SINGLE, metadata={"format": "pt"})
    write_metadata_files(folder / "model", ARCH, {SINGLE: hf_layout(ARCH, "float32")}, None)
    return policy.score(make_batch())[0]


def by_vllm(folder):
    """Log-probabilities of the batch by vLLM's own loader of adapters."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(folder / "model"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=32,
        enable_lora=True, max_lora_rank=8, kv_cache_memory_bytes=1 << 26, gpu_memory_utilization=0.02,
    )  # fmt: skip
    batch, parts, start = make_batch(), [], 0
    for prompt, response in zip(batch.prompt_lens_B.tolist(), batch.response_lens_B.tolist(), strict=True):
        tokens = batch.tokens_P[start : start + prompt + response].tolist()
        start += prompt + response
        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        request = LoRARequest("adapter", 1, str(folder / "adapter"))
        (output,) = llm.generate([{"prompt_token_ids": tokens}], asked, lora_request=request, use_tqdm=False)
        parts += [output.prompt_logprobs[at][tokens[at]].logprob for at in range(prompt, prompt + response)]
    return parts


def test_vllm_loads_an_exported_folder(tmp_path):
    scored = run_ranks(1, exported, tmp_path)[0]
    found = run_ranks(1, by_vllm, tmp_path)[0]
    torch.testing.assert_close(torch.tensor(found), scored, rtol=0, atol=2e-5)
