"""FP8 checkpoints: scales, what is left out, and how far the weights may move."""

import fnmatch
import json
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.hf import HfSource
from mrl.checkpoint.formats.trtllm import TrtllmSource, TrtllmTarget, read_activation_scales
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.commands.convert.convert import convert
from mrl.errors import UserError
from mrl.models.hf_config import family_of
from mrl.resharding.fp8_quantize import dequantize_matrix, quantize_matrices
from mrl.resharding.regions import full_region
from mrl.resharding.trtllm import TrtllmMapping, linear_modules
from tests.checkpoint.formats import trtllm_oracle as oracle
from tests.checkpoint.formats.trtllm_cases import ARCHS, as_nvidia_names, weights, written

FAMILIES = ["llama", "phi3", "qwen2 tied, one kv head", "mixtral", "qwen2_moe", "qwen3_moe"]
MAPPING = TrtllmMapping(2, 2, 1, 2)

ROUNDING = 2.0**-4 * (1 + 2.0**-10)
"""Half a step of three mantissa bits, relative; and a little for the fp32 product with the scale."""
SUBNORMAL = 2.0**-10 * (1 + 2.0**-10)
"""Half a step below the smallest normal number, in units of the scale."""


def scales_of(arch, mapping):
    modules = {m for rank in range(mapping.world_size) for m in linear_modules(arch, mapping, rank).values()}
    return {module: 0.01 * (1 + number) for number, module in enumerate(sorted(modules))}


def is_linear(name, tensor):
    return tensor.ndim > 1 and not any(
        x in name for x in ("vocab_embedding", "lm_head", "router", "shared_expert_gate")
    )


def assert_close(found, exact, scale):
    error = (found - exact).abs()
    assert (error <= torch.maximum(exact.abs() * ROUNDING, torch.as_tensor(scale * SUBNORMAL))).all()


def test_the_error_of_a_matrix_stays_below_half_a_step():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 64, 64, generator=generator) * torch.logspace(-6, 2, 64)
    quantized, scales = quantize_matrices("x", values)
    assert torch.allclose(scales * 448, values.abs().amax((1, 2)))
    for matrix, scale, exact in zip(quantized, scales, values, strict=True):
        assert_close(dequantize_matrix(matrix, scale), exact, scale)


def test_the_largest_value_is_kept_and_zeros_stay_zero():
    quantized, scales = quantize_matrices("x", torch.tensor([[[0.0, 0.0]], [[-3.5, 1.0]]]))
    assert scales.tolist() == pytest.approx([1.0, 3.5 / 448])
    assert quantized.float().tolist()[0] == [[0.0, 0.0]]
    assert dequantize_matrix(quantized[1], scales[1])[0, 0].item() == pytest.approx(-3.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(tmp_path, bad):
    arch = ARCHS["qwen3_moe"]
    hf = weights(arch)
    hf["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] = bad
    with pytest.raises(UserError, match=r"rank0.*layers\.1\.mlp\.fc\.weight.*not finite"):
        written(tmp_path, arch, TrtllmMapping(), "bfloat16", hf, activation_scales=scales_of(arch, TrtllmMapping()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_holds_fp8_matrices_with_their_scales_and_nothing_else_changes(tmp_path, family):
    arch = ARCHS[family]
    hf = weights(arch, "bfloat16")
    given = scales_of(arch, MAPPING)
    written(tmp_path, arch, MAPPING, "bfloat16", hf, activation_scales=given)
    config = json.loads((tmp_path / "config.json").read_text())
    oracle.check_config(config)
    excluded = config["quantization"]["exclude_modules"]
    for rank in range(MAPPING.world_size):
        found = load_file(tmp_path / f"rank{rank}.safetensors")
        for name, exact in oracle.expected(config, as_nvidia_names(arch, hf), rank).items():
            stored, module = found.pop(name), name.removesuffix(".weight")
            left_out = any(fnmatch.fnmatchcase(module, pattern) for pattern in excluded)
            if not is_linear(name, exact):
                assert left_out or exact.ndim == 1
                assert stored.dtype == oracle.stored_dtype(config, name) and torch.equal(stored.float(), exact)
                continue
            assert not left_out and stored.dtype == torch.float8_e4m3fn and stored.shape == exact.shape
            scale, activation = (found.pop(f"{module}.{x}_scaling_factor") for x in ("weights", "activation"))
            assert scale.dtype == activation.dtype == torch.float32
            assert scale.shape == ((exact.shape[0], 1) if exact.ndim == 3 else (1,)) and activation.shape == (1,)
            amax = exact.abs().amax((1, 2)).view(-1, 1) if exact.ndim == 3 else exact.abs().amax().view(1)
            assert torch.equal(scale, amax / 448)
            assert torch.equal(
                stored.float(), (exact / scale.view(-1, *[1] * (exact.ndim - 1))).to(stored.dtype).float()
            )
            parts = module.split(".")
            parts[2] = str(oracle.pp_layers(config, rank // 2)[int(parts[2])])
            assert activation.item() == pytest.approx(given[".".join(parts)])
        assert found == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_read_back_within_the_error_of_fp8(tmp_path, family):
    arch = ARCHS[family]
    hf = weights(arch)
    with TrtllmSource(written(tmp_path, arch, MAPPING, hf=hf, activation_scales=scales_of(arch, MAPPING))) as source:
        source.check(deep=True)
        assert source.config.fp8 and source.arch == arch
        exact = 0
        for name, tensor in hf.items():
            found = source.read(name, full_region(tensor.shape))
            largest = max(x.abs().max().item() for x in hf.values())
            assert_close(found, tensor, largest / 448)
            exact += torch.equal(found, tensor)
        assert 0 < exact < len(hf)


def test_activation_scales_must_be_given_for_each_linear_layer_and_for_no_other():
    arch = ARCHS["llama"]
    given = scales_of(arch, MAPPING)

    def target(scales):
        return TrtllmTarget(arch, MAPPING, "bfloat16", activation_scales=scales)

    with pytest.raises(UserError, match=r"lack 15 of 15 modules, first 'transformer\.layers\.0\.attention\.dense'"):
        target({})
    with pytest.raises(UserError, match="name 1 unknown modules, first 'lm_head'"):
        target({**given, "lm_head": 1.0})
    with pytest.raises(UserError, match="'transformer.layers.0.mlp.fc' is 0"):
        target({**given, "transformer.layers.0.mlp.fc": 0})
    assert target(given).describe()["quant_algo"] == "FP8"


def test_a_conversion_writes_the_same_fp8_files(tmp_path):
    arch = ARCHS["qwen2_moe"]
    hf, given = weights(arch, "bfloat16"), scales_of(arch, MAPPING)
    (tmp_path / "hf").mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in hf.items()}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(family_of(arch).arch_to_hf(arch)))
    target = TrtllmTarget(arch, MAPPING, "bfloat16", activation_scales=given)
    with closing(HfSource(tmp_path / "hf")) as source:
        manifest = convert(source, target, tmp_path / "converted")
    plain = written(tmp_path / "plain", arch, MAPPING, "bfloat16", hf, activation_scales=given)
    for file in target.files:
        assert manifest["target"]["files"][file.name]["xxh3"] == xxh3_file(plain / file.name)
    other = TrtllmTarget(arch, MAPPING, "bfloat16", activation_scales=dict.fromkeys(given, 1.0))
    assert other.describe() != target.describe()


def test_activation_scales_are_read_from_a_json_object_of_numbers(tmp_path):
    path = tmp_path / "scales.json"
    path.write_text('{"transformer.layers.0.mlp.fc": 0.5}')
    assert read_activation_scales(path) == {"transformer.layers.0.mlp.fc": 0.5}
    for text in ("{", "[]", '{"a": "0.5"}', '{"a": true}'):
        path.write_text(text)
        with pytest.raises(UserError, match="scales.json"):
            read_activation_scales(path)
    with pytest.raises(UserError, match="nowhere.json"):
        read_activation_scales(tmp_path / "nowhere.json")
