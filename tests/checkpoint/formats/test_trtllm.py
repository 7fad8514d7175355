"""TensorRT-LLM checkpoints against an independent implementation, and back."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.trtllm import TrtllmSource, TrtllmTarget, read_activation_scales
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.errors import UserError
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.hf import hf_layout
from mrl.resharding.regions import full_region
from mrl.resharding.trtllm import TrtllmMapping, linear_modules
from tests.checkpoint.formats import trtllm_oracle as oracle
from tests.checkpoint.formats.trtllm_cases import (
    ARCHS,
    CASES,
    as_nvidia_names,
    case_id,
    model,
    weights,
    write_checkpoint,
    written,
)

FAMILIES = ["llama", "phi3", "qwen2 tied, one kv head", "mixtral", "qwen2_moe", "qwen3_moe"]
LAYOUT = TrtllmMapping(2, 2, 1, 2)


@pytest.fixture
def tmp_path():
    """In memory: files are written through to the disk, which takes longer than all else here."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if place.is_dir() else None) as folder:
        yield Path(folder)


def files_of(folder, config):
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(config["mapping"]["world_size"])]


def assert_same_weights(source, hf, dtype):
    for name, tensor in hf.items():
        found = source.read(name, full_region(tensor.shape))
        assert source.dtype(name) == dtype and found.dtype == DTYPES[dtype], name
        assert torch.equal(found, tensor.to(DTYPES[dtype])), name


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_rank_is_what_nvidia_would_write_and_reads_back(tmp_path, case):
    arch, mapping = ARCHS[case[0]], case[1]
    hf = weights(arch)
    written(tmp_path, arch, mapping, hf=hf)
    config = json.loads((tmp_path / "config.json").read_text())
    oracle.check_config(config)
    assert len(list(tmp_path.glob("rank*"))) == mapping.world_size
    for rank, found in enumerate(files_of(tmp_path, config)):
        wanted = oracle.expected(config, as_nvidia_names(arch, hf), rank)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].shape == tensor.shape and torch.equal(found[name], tensor), (rank, name)
    with TrtllmSource(tmp_path) as source:
        assert source.arch == arch and source.config.mapping == mapping
        source.check(deep=True)
        assert_same_weights(source, hf, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_keeps_routers_in_fp32_and_reads_back_the_same_bits(tmp_path, family, dtype):
    arch = ARCHS[family]
    hf = weights(arch, dtype)
    written(tmp_path, arch, LAYOUT, dtype, hf)
    config = json.loads((tmp_path / "config.json").read_text())
    oracle.check_config(config)
    for rank, found in enumerate(files_of(tmp_path, config)):
        for name, tensor in oracle.expected(config, as_nvidia_names(arch, hf), rank).items():
            assert found[name].dtype == oracle.stored_dtype(config, name)
            assert torch.equal(found[name].float(), tensor), (rank, name)
    with TrtllmSource(tmp_path) as source:
        source.check(deep=True)
        assert_same_weights(source, hf, dtype)


def test_a_router_that_the_dtype_cannot_hold_stays_fp32(tmp_path):
    arch = ARCHS["qwen3_moe"]
    hf = weights(arch, "bfloat16")
    name = "model.layers.1.mlp.gate.weight"
    hf[name] = hf[name] * (1 + 2**-12)
    with TrtllmSource(written(tmp_path, arch, LAYOUT, "bfloat16", hf)) as source:
        assert source.dtype(name) == "float32"
        assert torch.equal(source.read(name, full_region(hf[name].shape)), hf[name])
        assert source.dtype("model.layers.0.mlp.gate.weight") == "bfloat16"


def test_regions_across_ranks_are_put_together(tmp_path):
    arch = ARCHS["qwen3_moe"]
    hf = weights(arch)
    with TrtllmSource(written(tmp_path, arch, TrtllmMapping(4, 1, 2, 2), hf=hf)) as source:
        for name, (rows, columns) in {
            "model.layers.2.self_attn.q_proj.weight": ((3, 17), (2, 9)),
            "model.layers.1.self_attn.o_proj.weight": ((0, 5), (4, 20)),
            "model.layers.0.mlp.experts.3.down_proj.weight": ((1, 16), (2, 7)),
        }.items():
            assert torch.equal(source.read(name, (rows, columns)), hf[name][slice(*rows), slice(*columns)])


def test_the_record_of_a_file_has_its_size_and_hash(tmp_path):
    arch = ARCHS["llama"]
    target = TrtllmTarget(arch, TrtllmMapping(), "float32")
    hf = weights(arch)
    tensors = {name: next(iter(stored.pieces)).hf_name for name, stored in target.files[0].layout.items()}
    assert tensors["transformer.layers.0.mlp.fc.weight"] == "model.layers.0.mlp.gate_proj.weight"
    write_checkpoint(tmp_path, target, hf)
    path = tmp_path / "rank0.safetensors"
    written_again = tmp_path / "again"
    written_again.mkdir()
    write_checkpoint(written_again, target, hf)
    assert xxh3_file(path) == xxh3_file(written_again / path.name)


def test_every_tensor_of_the_model_is_somewhere(tmp_path):
    for name, mapping in CASES:
        target = TrtllmTarget(ARCHS[name], mapping, "bfloat16")
        held = {piece.hf_name for file in target.files for stored in file.layout.values() for piece in stored.pieces}
        assert held == set(hf_layout(ARCHS[name], "bfloat16"))


def test_fp16_overflow_names_the_tensor_and_never_becomes_infinity(tmp_path):
    arch = ARCHS["llama"]
    hf = weights(arch, "float16")
    hf["model.layers.2.self_attn.k_proj.weight"][3, 5] = 70000.0
    with pytest.raises(UserError, match=r"rank0.*layers\.2\.attention\.qkv.*layers\.2\.self_attn\.k_proj.*float16"):
        written(tmp_path, arch, TrtllmMapping(), "float16", hf)


def test_a_tied_head_may_be_left_out(tmp_path):
    arch = ARCHS["llama tied"]
    written(tmp_path, arch, TrtllmMapping())
    path = tmp_path / "rank0.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    with TrtllmSource(tmp_path) as source:
        source.check(deep=True)
        assert source.arch == arch


def test_a_checkpoint_of_nvidias_converter_without_mrls_keys_reads(tmp_path):
    arch = ARCHS["mixtral"]
    hf = weights(arch)
    written(tmp_path, arch, TrtllmMapping(2, 1, 1, 2), hf=hf)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["mrl"], config["tie_word_embeddings"], config["logits_dtype"]
    config["mapping"] |= {"moe_cluster_size": 1, "attn_tp_size": 2, "attn_cp_size": 1, "auto_parallel": False}
    config["rank"] = 0
    path.write_text(json.dumps(config))
    with TrtllmSource(tmp_path) as source:
        source.check(deep=True)
        assert source.arch == arch
        assert_same_weights(source, hf, "float32")


@pytest.mark.parametrize("fp8", [False, True])
def test_a_shared_expert_beside_the_mlp_as_before_1_0_reads_too(tmp_path, fp8):
    arch = model("qwen2_moe_tiny", moe_intermediate_size=16, shared_expert_intermediate_size=32)
    hf = weights(arch)
    linear = {module for rank in range(2) for module in linear_modules(arch, TrtllmMapping(2), rank).values()}
    folders = [tmp_path / "new", tmp_path / "old"]
    for folder in folders:
        written(folder, arch, TrtllmMapping(2), hf=hf, activation_scales=dict.fromkeys(linear, 0.1) if fp8 else None)
    for file in folders[1].glob("*.safetensors"):
        tensors = {name.replace(".mlp.shared_", ".shared_"): tensor for name, tensor in load_file(file).items()}
        assert any(".0.shared_expert." in name for name in tensors)
        save_file(tensors, file)
    new, old = (TrtllmSource(folder) for folder in folders)
    old.check(deep=True)
    for name, tensor in hf.items():
        assert torch.equal(old.read(name, full_region(tensor.shape)), new.read(name, full_region(tensor.shape))), name
    scales = tmp_path / "scales.json"
    scales.write_text('{"transformer.layers.0.shared_expert.fc": 0.5}')
    assert read_activation_scales(scales) == {"transformer.layers.0.mlp.shared_expert.fc": 0.5}


def change(folder, rank, name, alter):
    path = folder / f"rank{rank}.safetensors"
    tensors = load_file(path)
    alter(tensors, name)
    save_file(tensors, path)


def poke(tensors, name):
    tensors[name].view(-1)[-1] += 1


COPIES = {
    "a norm": ("qwen2", 1, "transformer.layers.0.input_layernorm.weight", "differs between rank 0"),
    "a replicated kv head": ("qwen2 tied, one kv head", 1, "transformer.layers.0.attention.qkv.weight", "v_proj"),
    "a tied head": ("llama tied", 0, "lm_head.weight", "embed_tokens"),
    "a router": ("qwen3_moe", 1, "transformer.layers.1.mlp.router.weight", "mlp.gate.weight"),
    "padding of the head": ("qwen2", 1, "lm_head.weight", "padding"),
}


@pytest.mark.parametrize(("family", "rank", "name", "message"), COPIES.values(), ids=COPIES)
def test_a_deep_check_finds_a_copy_that_differs(tmp_path, family, rank, name, message):
    written(tmp_path, ARCHS[family], TrtllmMapping(2, 1))
    change(tmp_path, rank, name, poke)
    with TrtllmSource(tmp_path) as source:
        if name != "lm_head.weight" or "tied" not in family:  # a head that is another is no copy: always refused
            source.check()
        with pytest.raises(UserError, match=message):
            source.check(deep=True)


def transpose(tensors, name):
    tensors[name] = tensors[name].t().contiguous()


def narrow(tensors, name):
    tensors[name] = tensors[name].bfloat16()


def rename(tensors, name):
    tensors["transformer.layers.9.mlp.fc.weight"] = tensors.pop(name)


def add(tensors, name):
    tensors["transformer.stranger"] = tensors[name].clone()


DAMAGE = {
    "shape": (transpose, r"rank1.*'transformer.layers.0.mlp.fc.weight' is \[16, 16, 16\]|is \[16, 16\]|requires"),
    "dtype": (narrow, "bfloat16; config.json requires .* float32"),
    "name": (rename, "lacks 1 tensors.*'transformer.layers.0.mlp.fc.weight'"),
    "extra": (add, "has unknown 1 tensors.*'transformer.stranger'"),
}


@pytest.mark.parametrize(("alter", "message"), DAMAGE.values(), ids=DAMAGE)
def test_files_that_the_loader_would_refuse_are_refused(tmp_path, alter, message):
    written(tmp_path, model("llama_tiny", hidden_size=16, intermediate_size=48, num_hidden_layers=1), TrtllmMapping(2))
    change(tmp_path, 1, "transformer.layers.0.mlp.fc.weight", alter)
    with TrtllmSource(tmp_path) as source, pytest.raises(UserError, match=message):
        source.check()


def test_missing_superfluous_and_truncated_rank_files_are_refused(tmp_path):
    written(tmp_path, ARCHS["llama"], TrtllmMapping(2, 1))
    second = tmp_path / "rank1.safetensors"
    data = second.read_bytes()
    (tmp_path / "rank2.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"also has rank2.*2 x 1 ranks"):
        TrtllmSource(tmp_path)
    (tmp_path / "rank2.safetensors").unlink()
    second.write_bytes(data[:-1])
    with pytest.raises(UserError, match="rank1.*not a complete"):
        TrtllmSource(tmp_path)
    second.unlink()
    with pytest.raises(UserError, match="lacks rank1"):
        TrtllmSource(tmp_path)
