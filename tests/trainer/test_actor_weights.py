"""The actor's first weights: each parameter is read by one of the ranks that hold it, and is there on all of them.

And the folder without weights that an engine builds its model from.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.checkpoint.formats.hf import HfSource, load_from_hf
from mrl.data.tokenizer import CharTokenizer
from mrl.models.hf_config import arch_from_folder, family_of, read_config
from mrl.models.kernels.rope_frequencies import inverse_frequencies
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.random_init import random_init
from mrl.trainer.actor_weights import ActorWeights
from tests.checkpoint.formats.test_hf import write_folder
from tests.megatron.actors import ARCHS, CONTEXT_LAYOUTS, EXPERT_LAYOUTS, LAYOUTS, MIXTURES, make_policy
from tests.ranks import run_ranks

THETA = 5.0e5


def read(folder, name, grid):
    """Bytes that this rank read, those that it holds, and whether all are the folder's; of actor and reference."""
    arch = {**ARCHS, **MIXTURES}[name]
    policy = make_policy(arch, grid, seed=None)
    expected = {key: torch.full_like(tensor, torch.nan) for key, tensor in policy.named_tensors().items()}
    load_from_hf(folder, arch, policy.layout(), expected)
    plan = SimpleNamespace(arch=arch, config=SimpleNamespace(model=SimpleNamespace(path=str(folder))))
    weights = ActorWeights(plan, policy, policy.groups)
    num_bytes, original = [0], HfSource.read

    def counted(self, hf_name, region):
        found = original(self, hf_name, region)
        num_bytes[0] += found.nbytes
        return found

    HfSource.read = counted
    try:
        weights.load_initial()
        once = num_bytes[0]
        weights.load_reference(str(folder))
    finally:
        HfSource.read = original
    for found in (policy.named_tensors(), policy.reference_tensors()):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert num_bytes[0] == 2 * once
    return once, sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize(
    ("name", "grid", "shares"),
    [
        ("qwen2", LAYOUTS["tp2_pp2"], [1, 1, 1, 1]),
        ("qwen2", LAYOUTS["dp2"], [1, 0]),
        ("qwen2", CONTEXT_LAYOUTS["cp2_tp2"], [1, 1, 0, 0]),
        ("qwen3_moe", EXPERT_LAYOUTS["ep2"], [1, None]),  # experts only
        ("qwen3_moe", EXPERT_LAYOUTS["ep2_dp2"], [1, None, 0, 0]),
        ("glm4_moe", EXPERT_LAYOUTS["ep2"], [1, None]),
        ("glm4_moe", EXPERT_LAYOUTS["ep2_pp2"], [1, None, 1, None]),
    ],
)
def test_each_parameter_is_read_once_and_is_there_on_all_ranks(name, grid, shares, tmp_path):
    arch = {**ARCHS, **MIXTURES}[name]
    layout = hf_layout(arch, "float32")
    tensors = allocate(layout)
    random_init(arch, layout, tensors, seed=4)
    for key, tensor in tensors.items():
        if "correction_bias" in key:  # random weights have none
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()))
    write_folder(arch, tmp_path, tensors)
    for (num_bytes, held), share in zip(run_ranks(grid.world_size, read, tmp_path, name, grid), shares, strict=True):
        if share is None:
            assert 0 < num_bytes < held
        elif share == 0:
            assert num_bytes == 0
        else:
            assert num_bytes > 0.9 * held - 4096 * 4  # padding of the vocabulary is not read


NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
"""As transformers 5 writes it; transformers 4 takes its default of 10,000 for such a file."""
OLD = {"rope_theta": THETA}


def for_the_engine(folder, root, dtype):
    """config.json of the folder that an engine gets, and the rotary frequencies that transformers reads there."""
    arch = arch_from_folder(folder)
    tokenizer = CharTokenizer("0123456789")
    settings = SimpleNamespace(
        model=SimpleNamespace(path=str(folder), dtype="float32"), rollout=SimpleNamespace(dtype=dtype)
    )
    plan = SimpleNamespace(arch=arch, config=settings, run=SimpleNamespace(root=root), tokenizer=tokenizer)
    groups = SimpleNamespace(rank=0, samplers=None, grid=ParallelLayout(1))
    made = ActorWeights(plan, None, groups).model_folder({})
    read = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made))
    return read_config(made), read.model.rotary_emb.inv_freq


@pytest.mark.parametrize("spelling", [OLD, NEW], ids=["old", "new"])
def test_an_engine_gets_the_structure_in_the_spellings_of_all_versions_of_transformers(spelling, tmp_path):
    config = family_of(ARCHS["qwen2"]).arch_to_hf(ARCHS["qwen2"])
    config = {key: value for key, value in config.items() if not key.startswith("rope_")} | spelling
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "initializer_range": 0.3}))
    ((made, frequencies),) = run_ranks(1, for_the_engine, tmp_path / "model", tmp_path / "run", "bfloat16")
    assert made["rope_theta"] == made["rope_parameters"]["rope_theta"] == THETA
    assert made["initializer_range"] == 0.3 and made["dtype"] == "bfloat16"
    assert torch.equal(frequencies, inverse_frequencies(ARCHS["qwen2"].head_dim, THETA))
