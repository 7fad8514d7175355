"""FP8 weights of a Hugging Face folder: dequantized as transformers does, by the slices of each rank, or refused."""

import json
from contextlib import closing

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.hf import HfSource, HfTarget, load_from_hf
from mrl.commands.convert.convert import convert
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_config, arch_from_folder, family_of
from mrl.models.presets import PRESETS, arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from tests.resharding.archs import filled

FP8 = torch.float8_e4m3fn
SMALL = {"num_hidden_layers": 2, "hidden_size": 40, "intermediate_size": 56, "head_dim": 12, "vocab_size": 33}
PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def arch_of(preset):
    return arch_from_preset(preset, SMALL, None)


def block_config(rows, columns):
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
        "modules_to_not_convert": ["lm_head"],
    }


def compressed_config(strategy, **weights):
    group = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "version": "0.9",
    }


def counts(shape, block):
    return tuple(-(-size // side) for size, side in zip(shape, block, strict=True))


def dequantized(stored, scales, block, dtype=torch.bfloat16):
    """Computes the weights independently: repeats each scale over its block and cuts off what exceeds the matrix."""
    spread = scales.reshape(counts(stored.shape, block)).float()
    for dim in (0, 1):
        spread = spread.repeat_interleave(block[dim], dim)
    return (stored.float() * spread[: stored.shape[0], : stored.shape[1]]).to(dtype)


def write(folder, arch, quantization, *, suffix, block_of, seed=0, scale_shape=None):
    """A folder with projections in FP8; returns its tensors dequantized."""
    generator = torch.Generator().manual_seed(seed)
    tensors, expected = {}, {}
    for name, stored in hf_layout(arch, "bfloat16").items():
        if not name.endswith(PROJECTIONS):
            tensors[name] = expected[name] = torch.randn(stored.shape, generator=generator).to(torch.bfloat16)
            continue
        block = block_of(stored.shape)
        weight = (torch.randn(stored.shape, generator=generator) * 100).to(FP8)
        scales = torch.rand(counts(stored.shape, block), generator=generator) + 0.01
        expected[name] = dequantized(weight, scales, block)
        tensors[name] = weight
        tensors[name + suffix] = scales if scale_shape is None else scales.reshape(scale_shape(scales))
    config = {
        **family_of(arch).arch_to_hf(arch),
        "torch_dtype": "bfloat16",
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return expected


def assert_each_rank_has_its_slices(folder, arch, expected, dtype="bfloat16"):
    grid = ParallelLayout(4, tp=2, pp=2)
    layouts = [megatron_layout(arch, grid, rank, dtype=dtype, te=False) for rank in range(4)]
    layouts += [native_layout(arch, 2, rank, dtype) for rank in range(2)]
    for layout in layouts:
        tensors = allocate(layout)
        load_from_hf(folder, arch, layout, tensors)
        for name, right in filled(layout, expected).items():
            assert torch.equal(tensors[name].float(), right), name


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    preset=st.sampled_from(["qwen2_tiny", "phi3_tiny", "qwen3_moe_tiny", "mixtral_tiny"]),
    block=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    seed=st.integers(0, 99),
)
def test_blocks_of_any_size_are_read_by_slices(tmp_path_factory, preset, block, dtype, seed):
    folder, arch = tmp_path_factory.mktemp("fp8"), arch_of(preset)
    expected = write(folder, arch, block_config(*block), suffix="_scale_inv", block_of=lambda _: block, seed=seed)
    assert arch_from_folder(folder) == arch
    assert_each_rank_has_its_slices(folder, arch, expected, dtype)


@pytest.mark.parametrize("block", [(8, 4), (4, 8), (1, 2)], ids=str)
def test_the_formula_is_that_of_transformers(tmp_path, block):
    if Version(transformers.__version__).major < 5:
        pytest.skip("transformers 4 needs Triton for it")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    arch = arch_of("qwen2_tiny")
    write(tmp_path, arch, block_config(*block), suffix="_scale_inv", block_of=lambda _: block)
    stored = load_file(tmp_path / "model.safetensors")
    layout = hf_layout(arch, "bfloat16")
    tensors = allocate(layout)
    load_from_hf(tmp_path, arch, layout, tensors)
    names = [name for name in layout if name + "_scale_inv" in stored]
    assert names
    for name in names:
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[name + "_scale_inv"], torch.bfloat16)
        assert torch.equal(tensors[name], theirs)


@pytest.mark.parametrize(
    ("strategy", "block_of", "scale_shape"),
    [
        ("tensor", lambda shape: shape, lambda scales: (1,)),
        ("tensor", lambda shape: shape, lambda scales: ()),
        ("channel", lambda shape: (1, shape[1]), None),
        ("block", lambda shape: (16, 24), None),
    ],
)
def test_fp8_of_compressed_tensors_is_read(tmp_path, strategy, block_of, scale_shape):
    arch = arch_of("qwen3_tiny")
    quantization = compressed_config(strategy, block_structure=[16, 24] if strategy == "block" else None)
    expected = write(tmp_path, arch, quantization, suffix="_scale", block_of=block_of, scale_shape=scale_shape)
    assert_each_rank_has_its_slices(tmp_path, arch, expected)


@pytest.mark.parametrize("preset", ["qwen2_tiny", "qwen3_moe_tiny"])
def test_a_conversion_writes_the_dequantized_model_without_its_quantization(tmp_path, preset):
    arch, folder, out = arch_of(preset), tmp_path / "fp8", tmp_path / "out"
    folder.mkdir()
    expected = write(folder, arch, block_config(16, 16), suffix="_scale_inv", block_of=lambda _: (16, 16))
    with closing(HfSource(folder)) as source:
        source.check()
        dtypes = {name: source.dtype(name) for name in hf_layout(arch, "float32")}
        assert set(dtypes.values()) == {"bfloat16"}
        convert(source, HfTarget(arch, dtypes, like=folder), out)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    assert load_file(out / "model.safetensors").keys() == expected.keys()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    own = HfSource(out)
    own.check()
    assert all(torch.equal(value, expected[name]) for name, value in load_file(out / "model.safetensors").items())
    assert theirs.dtype == torch.bfloat16


NAME = "model.layers.1.self_attn.k_proj.weight"
SCALE = NAME + "_scale_inv"
BROKEN = {
    "missing": (lambda tensors: tensors.pop(SCALE), f"'{NAME}' is stored in FP8 and has no scales"),
    "another shape": (lambda tensors: tensors.update({SCALE: torch.ones(2, 2)}), f"'{SCALE}' has shape [2, 2]"),
    "one for all": (lambda tensors: tensors.update({SCALE: torch.ones(())}), f"'{SCALE}' has shape []"),
    "integers": (lambda tensors: tensors.update({SCALE: torch.ones(2, 3, dtype=torch.int32)}), "stored as int32"),
    "of a plain matrix": (
        lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.bfloat16)}),
        f"'{SCALE}' has scales for '{NAME}'",
    ),
    "of no matrix": (lambda tensors: tensors.update({"model.x.weight_scale_inv": torch.ones(1)}), "unknown tensors"),
}
VALUES = {"NaN": torch.nan, "negative": -1.0, "zero": 0.0, "infinite": torch.inf}


def broken(folder, change):
    write(folder, arch_of("qwen2_tiny"), block_config(16, 16), suffix="_scale_inv", block_of=lambda _: (16, 16))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_scales_that_do_not_belong_to_a_matrix_are_refused_by_name(tmp_path, change, message):
    broken(tmp_path, change)
    with closing(HfSource(tmp_path)) as source, pytest.raises(UserError) as refusal:
        source.check()
    assert message in str(refusal.value) and str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_scales_that_are_no_numbers_above_0_are_refused_by_name(tmp_path, value):
    broken(tmp_path, lambda tensors: tensors[SCALE].select(0, 1).fill_(value))
    arch = arch_of("qwen2_tiny")
    layout = hf_layout(arch, "bfloat16")
    with pytest.raises(UserError, match=SCALE):
        load_from_hf(tmp_path, arch, layout, allocate(layout))


def test_a_rank_reads_the_scales_of_its_own_blocks_only(tmp_path):
    """Only the last block of a row is wrong; it belongs to the second of two tensor-parallel ranks."""
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    broken(tmp_path, lambda tensors: tensors[name][:, -1].fill_(torch.nan))
    arch = arch_of("qwen2_tiny")
    first, second = (native_layout(arch, 2, rank, "bfloat16") for rank in (0, 1))
    load_from_hf(tmp_path, arch, first, allocate(first))
    with pytest.raises(UserError, match="o_proj"):
        load_from_hf(tmp_path, arch, second, allocate(second))


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        ({"bits": 4}, "quant_method=None"),
        (7, "quantization_config is 7"),
        ({**block_config(4, 4), "fmt": "e5m2"}, "fmt='e5m2'"),
        ({**block_config(4, 4), "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({**block_config(4, 4), "weight_block_size": [4]}, "weight_block_size"),
        ({**block_config(4, 4), "weight_block_size": [4, 0]}, "weight_block_size"),
        ({**block_config(4, 4), "group_size": 32}, "'group_size'"),
        ({**compressed_config("tensor"), "format": "pack-quantized"}, "format='pack-quantized'"),
        ({**compressed_config("tensor"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**compressed_config("tensor"), "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
        ({**compressed_config("tensor"), "config_groups": {}}, "config_groups"),
        (compressed_config("group"), "strategy='group'"),
        (compressed_config("tensor", num_bits=4), "num_bits=4"),
        (compressed_config("tensor", type="int"), "type='int'"),
        (compressed_config("tensor", symmetric=False), "symmetric=False"),
        (compressed_config("block"), "block_structure"),
    ],
    ids=str,
)
def test_other_quantizations_are_refused_by_key(quantization, key):
    with pytest.raises(UserError) as refusal:
        arch_from_config({**PRESETS["qwen2_tiny"], "quantization_config": quantization})
    assert key in str(refusal.value)


def test_fp8_weights_of_all_experts_in_one_tensor_are_refused(tmp_path):
    arch = arch_of("qwen3_moe_tiny")
    write(tmp_path, arch, block_config(16, 16), suffix="_scale_inv", block_of=lambda _: (16, 16))
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    down = [own[f"{prefix}{index}.down_proj.weight"].view(torch.uint8) for index in range(4)]
    gates = [
        torch.cat([own[f"{prefix}{index}.{part}_proj.weight"].view(torch.uint8) for part in ("gate", "up")])
        for index in range(4)
    ]
    tensors[prefix + "down_proj"] = torch.stack(down).view(FP8)
    tensors[prefix + "gate_up_proj"] = torch.stack(gates).view(FP8)
    save_file(tensors, tmp_path / "model.safetensors")
    with closing(HfSource(tmp_path)) as source, pytest.raises(UserError, match="one tensor per expert"):
        source.check()
