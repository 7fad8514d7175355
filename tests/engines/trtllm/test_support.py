"""What TensorRT-LLM kept under truncation, from its logits: an actor with equal weights has a ratio of 1 over it."""

import os
import sys
from contextlib import closing

import pytest
import torch

from mrl.config.config import RolloutConfig
from mrl.engines.trtllm.engine import LlmEngine
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.trtllm import TrtllmMapping
from mrl.trainer.hf_export import write_model_folder
from tests.engines.specs import spec_of
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import STANDIN, forget
from tests.engines.trtllm.engines import build_engines
from tests.engines.trtllm.signature import FLAVOUR_VARIABLE
from tests.megatron import truncation
from tests.megatron.actors import ARCHS, make_policy
from tests.ranks import run_ranks

ARCH = ARCHS["qwen2"]
RATIO = 1e-5
"""The project's bound."""
LIMITS = {"prompt_length": 16, "response_length": 16, "gpu_memory_utilization": 0.05, "max_num_seqs": 16}


def made(kind, folder):
    """An engine without weights, of a run that trains under truncation."""
    asked = {**truncation.CUTS["together"], "temperature": truncation.TEMPERATURE, **LIMITS}
    if kind == "built":
        from mrl.engines.trtllm.trt_engine import BuiltEngine

        built = build_engines(folder, ARCH, TrtllmMapping())
        return BuiltEngine(
            spec_of(RolloutConfig(name="trtllm_engine", engine_dir=str(built), **asked), ARCH, decode=str)
        )

    def model_folder(further):
        write_model_folder(folder, ARCH, "float32", tiny.TOKENIZER, further=further)
        return folder

    return LlmEngine(spec_of(tiny.rollout(**asked), ARCH, decode=str, write_model_folder=model_folder))


def ratios(kind, folder):
    """By cut: ratios of an actor with the weights that sampled, with the support and without, and kept masses."""
    sys.path.insert(0, str(STANDIN))
    os.environ[FLAVOUR_VARIABLE] = "1.2" if kind == "built" else kind
    forget()
    groups, found = None, {}
    try:
        with closing(made(kind, folder)) as engine:
            for name, cut in truncation.CUTS.items():
                policy = make_policy(
                    ARCH, ParallelLayout(1), rollout=vars(truncation.rollout_config(cut)), groups=groups
                )
                groups = policy._groups
                data, mass = truncation.sampled(policy, engine, cut)
                told = torch.stack([policy.score(data.batch)[0], truncation.uncorrected(policy, data.batch)])
                told = truncation.in_order(policy, data.batch, told - data.batch.rollout_logprobs_R)
                found[name] = (*told.exp(), mass)
        return found
    finally:
        sys.path.remove(str(STANDIN))
        del os.environ[FLAVOUR_VARIABLE]
        forget()


@pytest.mark.parametrize("kind", ["1.2", "1.3", "built"])
def test_equal_weights_give_a_ratio_of_1_and_without_the_support_the_kept_mass(kind, tmp_path):
    (found,) = run_ranks(1, ratios, kind, tmp_path)
    for name in truncation.CUTS:
        corrected, without, mass = found[name]
        assert (corrected - 1).abs().max() < RATIO, name
        torch.testing.assert_close(without, mass, rtol=RATIO, atol=0)
        assert mass.mean() < 0.97, name
