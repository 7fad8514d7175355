"""MXFP4 experts of gpt-oss: dequantized as transformers does, by the slices of each rank, or refused."""

import json
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.hf import HfSource, HfTarget, load_from_hf
from mrl.commands.convert.convert import convert
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder, family_of
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_names import join, written_together
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from tests.resharding.archs import filled

ARCH = arch_from_preset(
    "gpt_oss_tiny", {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 64, "vocab_size": 33}, None
)
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture
def quantized(tmp_path):
    """A folder in the form of the published ones, and its tensors as transformers dequantizes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    random = {
        name: tensor.normal_(generator=generator) for name, tensor in allocate(hf_layout(ARCH, "bfloat16")).items()
    }
    stored, expected = {}, {}
    for name, tensor in join(random.items(), written_together(ARCH)):
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            stored[name] = expected[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(100, 140, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
        assert expected[name].shape == tensor.shape
    save(tmp_path, stored)
    return tmp_path, expected


def save(folder, stored, **quantization):
    config = {**family_of(ARCH).arch_to_hf(ARCH), "quantization_config": {**CONFIG, **quantization}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")


def test_every_rank_reads_what_transformers_dequantizes(quantized):
    folder, expected = quantized
    arch = arch_from_folder(folder)
    assert arch == ARCH
    table = {}
    for stored, parts in written_together(arch).items():
        table |= {name: located.view_in(expected[stored]) for name, located in parts.items()}
    whole = {name: table.get(name, expected.get(name)) for name in hf_layout(arch, "float32")}
    grid = ParallelLayout(4, tp=2, pp=2, ep=2, etp=1)
    layouts = [megatron_layout(arch, grid, rank, dtype="float32", te=False) for rank in range(4)]
    layouts += [native_layout(arch, 2, rank, "bfloat16", ep_size=ep) for rank in range(2) for ep in (1, 2)]
    for layout in layouts:
        tensors = allocate(layout)
        load_from_hf(folder, arch, layout, tensors)
        wanted = filled(layout, whole)
        assert all(torch.equal(tensors[name].float(), wanted[name].float()) for name in layout)


def test_a_conversion_writes_what_transformers_has_in_memory(quantized, tmp_path_factory):
    folder, expected = quantized
    out = tmp_path_factory.mktemp("out") / "hf"
    with closing(HfSource(folder)) as source:
        convert(source, HfTarget(ARCH, "bfloat16", like=folder), out)
    written = load_file(out / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stored: stored[f"{EXPERTS}_scales"].view(-1).fill_(255), f"{EXPERTS}_scales"),
        (lambda stored: stored.pop(f"{EXPERTS}_scales"), EXPERTS),
        (lambda stored: stored.update({f"{EXPERTS}_scales": stored[f"{EXPERTS}_scales"][:, 1:]}), f"{EXPERTS}_scales"),
        (lambda stored: stored.update({f"{EXPERTS}_blocks": stored[f"{EXPERTS}_blocks"].float()}), f"{EXPERTS}_blocks"),
        (
            lambda stored: stored.update({f"{EXPERTS}_blocks": stored[f"{EXPERTS}_blocks"][..., 1:]}),
            f"{EXPERTS}_blocks",
        ),
    ],
    ids=["nan", "no scales", "few scales", "dtype", "few bytes"],
)
def test_what_is_not_mxfp4_is_refused_by_name(change, named, quantized):
    folder, _ = quantized
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save(folder, stored)
    layout = hf_layout(ARCH, "float32")
    with pytest.raises(UserError, match=named):
        load_from_hf(folder, ARCH, layout, allocate(layout))


def test_an_unknown_setting_is_refused(quantized):
    folder, _ = quantized
    save(folder, load_file(folder / "model.safetensors"), block_size=16)
    with pytest.raises(UserError, match="block_size"):
        arch_from_folder(folder)
