"""HF -> Megatron -> HF and HF -> Megatron -> TensorRT-LLM -> HF give the same bytes, whatever the layout."""

import itertools
import math
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

from mrl.checkpoint.formats.hf import HfSource, HfTarget
from mrl.checkpoint.formats.megatron import MegatronSource, MegatronTarget
from mrl.checkpoint.formats.trtllm import TrtllmSource, TrtllmTarget
from mrl.checkpoint.formats.trtllm_config import model_refusal
from mrl.commands.convert.convert import convert
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.trtllm import TrtllmMapping
from tests.checkpoint.formats.test_hf import write_folder
from tests.resharding.archs import LINEAR, small

pytestmark = pytest.mark.slow

MOE = {"num_key_value_heads": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 8, "qk_rope_head_dim": 4, "moe_intermediate_size": 16, "n_routed_experts": 4}

FAMILIES = {
    "qwen2, tied": (small("qwen2_tiny"), "bfloat16"),
    "qwen2, one kv head": (small("qwen2_tiny", num_key_value_heads=1, tie_word_embeddings=False), "float32"),
    "llama, a kv head for each query head": (small("llama_tiny", num_key_value_heads=8), "float16"),
    "qwen3, head_dim apart, tied": (small("qwen3_tiny", head_dim=6), "float32"),
    "mistral": (small("mistral_tiny"), "float32"),
    "phi3, fused": (small("phi3_tiny"), "bfloat16"),
    "mixtral": (small("mixtral_tiny", num_key_value_heads=2), "bfloat16"),
    "qwen2_moe, shared expert, tied": (small("qwen2_moe_tiny", **MOE), "float32"),
    "qwen3_moe": (small("qwen3_moe_tiny", **MOE), "bfloat16"),
    "qwen3_moe, dense layers": (small("qwen3_moe_tiny", **MOE, mlp_only_layers=[1, 3]), "bfloat16"),
    "gemma3_text": (small("gemma3_text_tiny", head_dim=6), "bfloat16"),
    "gpt_oss, fused": (small("gpt_oss_tiny"), "bfloat16"),
    "deepseek_v3": (small("deepseek_v3_tiny", **LATENT, n_group=2, topk_group=1), "bfloat16"),
    "deepseek_v2": (small("deepseek_v2_tiny", **LATENT), "float32"),
    "qwen3_next": (small("qwen3_next_tiny", **MOE, **LINEAR), "bfloat16"),
    "qwen3_5_text": (small("qwen3_5_text_tiny", **LINEAR), "float32"),
    "glm4_moe": (small("glm4_moe_tiny", **MOE, use_qk_norm=True, head_dim=4), "bfloat16"),
}
"""101 rows of vocabulary, a prime; 8 query heads, 4 layers, 4 experts."""

STAGES = ({"pp": 1}, {"pp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2}, {"pp": 2, "first_stage_layers": 1})
EXPERTS = ((1, None), (2, None), (4, 1), (2, 1))
"""(ep, etp)"""


def grids(arch):
    for tp, stages, (ep, etp) in itertools.product((1, 2, 4, 8), STAGES, EXPERTS if arch.moe else EXPERTS[:1]):
        if arch.moe and (tp == 8 or (stages["pp"] == 4 and ep > 2)):
            continue
        world = stages["pp"] * math.lcm(tp, ep * (tp if etp is None else etp))
        yield ParallelLayout(world, tp=tp, ep=ep, etp=etp, **stages)


def mappings(arch):
    if model_refusal(arch):
        return
    for number, (tp, pp) in enumerate(itertools.product((1, 2, 4, 8), (1, 2, 3))):
        embedding = (
            {},
            {"use_parallel_embedding": True},
            {"use_parallel_embedding": True, "embedding_sharding_dim": 1},
        )
        for ep in (1, 2, 4) if arch.moe else (1,):
            if tp % ep == 0 and not (arch.moe and tp == 8 and ep == 1):
                yield TrtllmMapping(tp, pp, moe_ep_size=ep, **embedding[(number + ep) % 3])


def test_the_grid_is_as_large_as_promised():
    combinations = sum(len([*grids(arch), *mappings(arch)]) for arch, _ in FAMILIES.values())
    assert combinations >= 300


@pytest.fixture(scope="module")
def memory():
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if place.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, memory):
    """A folder of a model with random weights, as `HfTarget` writes it, and the same in one Megatron layout."""
    arch, dtype = FAMILIES[request.param]
    torch.manual_seed(0)
    tensors = {name: t.normal_() for name, t in allocate(hf_layout(arch, dtype)).items()}
    folder = Path(tempfile.mkdtemp(dir=memory))
    (folder / "saved").mkdir()
    write_folder(arch, folder / "saved", tensors)
    with closing(HfSource(folder / "saved")) as source:
        convert(source, HfTarget(arch, dtype), folder / "hf")
        convert(source, MegatronTarget(arch, ParallelLayout(4, tp=2, pp=2), dtype), folder / "megatron")
    return arch, dtype, folder


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def that_do_not_come_back(model, first, formats, layouts):
    """The layouts from which the model does not come back as it was.

    Args:
        model: The fixture.
        first: Name and source class of what is converted.
        formats: Target and source class of what lies between.
        layouts: Of that one.
    """
    arch, dtype, folder = model
    (name, source_class), (there_class, back_class) = first, formats
    expected = files(folder / "hf")
    wrong = []
    for layout in layouts:
        with closing(source_class(folder / name)) as source:
            convert(source, there_class(arch, layout, dtype), folder / "there")
        with closing(back_class(folder / "there")) as source:
            convert(source, HfTarget(source.arch, dtype), folder / "back")
        if files(folder / "back") != expected:
            wrong.append(layout)
        for done in ("there", "back"):
            shutil.rmtree(folder / done)
    return wrong


def test_through_megatron(model):
    formats = (MegatronTarget, MegatronSource)
    assert that_do_not_come_back(model, ("hf", HfSource), formats, grids(model[0])) == []


def test_through_megatron_and_tensorrt_llm(model):
    formats = (TrtllmTarget, TrtllmSource)
    assert that_do_not_come_back(model, ("megatron", MegatronSource), formats, mappings(model[0])) == []
