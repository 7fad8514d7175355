"""A tiny model in the LLM API's engine, updated as `WeightSync` does it, without ranks."""

from __future__ import annotations

from contextlib import closing, contextmanager

import torch

from mrl.config.config import CheckpointEngineConfig, RolloutConfig
from mrl.data.tokenizer import CharTokenizer
from mrl.engines.base import SamplingConfig
from mrl.engines.native.engine import NativeEngine
from mrl.engines.trtllm.engine import LlmEngine
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from mrl.trainer.hf_export import write_model_folder
from mrl.types import Prompt
from tests.engines.specs import spec_of
from tests.resharding.archs import filled, small

TOKENIZER = CharTokenizer("0123456789<>+#")
ARCH = small("qwen2_tiny", vocab_size=14)
SAMPLING = SamplingConfig(n=3, max_tokens=6, stop_token_ids=(13,), seed=5)
PROMPTS = [Prompt(uid=uid, prompt_ids=tuple(range(1, 3 + uid)), text="") for uid in range(3)]
CPU = torch.device("cpu")
BUCKET = CheckpointEngineConfig(update_weights_bucket_megabytes=1)


def rollout(**settings):
    return RolloutConfig(
        **{
            "name": "trtllm",
            "prompt_length": 8,
            "response_length": 8,
            "max_num_seqs": 16,
            "checkpoint_engine": BUCKET,
            **settings,
        }
    )


def trains_with(sampling):
    """The fields of `rollout` of a run that trains on such samples."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: getattr(sampling, name) for name in names} | {"do_sample": not sampling.greedy}


@contextmanager
def engine(
    folder, arch=ARCH, *, timeout_s=20.0, trains_on_logprobs=True, device=CPU, tp_group=None, dtype=torch.float32,
    **settings,
):  # fmt: skip
    """An engine that was never refitted."""

    def model_folder(further):
        write_model_folder(folder, arch, str(dtype).removeprefix("torch."), TOKENIZER, further=further)
        return folder

    made = LlmEngine(
        spec_of(
            rollout(**settings), arch, decode=TOKENIZER.decode, write_model_folder=model_folder, timeout_s=timeout_s,
            trains_on_logprobs=trains_on_logprobs, device=device, tp_group=tp_group, dtype=dtype,
        )
    )  # fmt: skip
    with closing(made):
        yield made


def weights(arch=ARCH, seed=0):
    """Hugging Face tensors that a refit brings."""
    layout = hf_layout(arch, "float32")
    tensors = allocate(layout)
    random_init(arch, layout, tensors, seed)
    for tensor in tensors.values():  # logits that differ: a small random model is nearly flat
        tensor.mul_(4 if tensor.dim() > 1 else 1)
    return tensors


def refit(engine, tensors, version=0):
    engine.begin_update()
    fill(engine, tensors)
    engine.finish_update(version)


def fill(engine, tensors):
    """What this rank wants of these tensors."""
    wanted = engine.layout()
    parts = filled({name: wanted[name] for name in tensors if name in wanted}, tensors)
    for name, tensor in parts.items():
        engine.update_weights([WeightSlice(name, full_region(tensor.shape), tensor)])


def native(tensors, arch=ARCH, **settings):
    """The native engine with the same weights."""
    config = rollout(name="native", gpu_memory_utilization=0.02, **settings)
    made = NativeEngine(spec_of(config, arch, decode=TOKENIZER.decode))
    layout = made.layout()
    made.begin_update()
    for name, tensor in filled(layout, tensors).items():
        made.update_weights([WeightSlice(name, full_region(tensor.shape), tensor)])
    made.finish_update(0)
    return made
