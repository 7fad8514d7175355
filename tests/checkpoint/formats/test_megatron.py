"""Megatron's distributed checkpoint: byte for byte there and back, and the same to Megatron itself."""

import json
import os
import pickle
import shutil

import pytest
import torch

from mrl.checkpoint.formats.checkpoint_metadata import METADATA, read_metadata
from mrl.checkpoint.formats.megatron import MegatronSource, MegatronTarget
from mrl.checkpoint.formats.torch_dist import read_contents
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_config, family_of
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dist_checkpoint import rank_shards
from mrl.resharding.hf import hf_layout
from mrl.resharding.regions import full_region, slices
from tests.checkpoint.formats import megatron_jobs
from tests.checkpoint.formats.megatron_jobs import same
from tests.megatron.actors import ARCHS as LIVE
from tests.megatron.actors import MIXTURES
from tests.ranks import run_ranks
from tests.resharding.archs import ARCHS, ODD_VOCAB, filled

KEY = "decoder.layers.mlp.linear_fc2.weight"
WIDE = {"num_hidden_layers": 4}
MODELS = {
    **ARCHS,
    "qwen3_moe": arch_from_preset("qwen3_moe_tiny", WIDE, ODD_VOCAB),
    "qwen2_moe": arch_from_preset("qwen2_moe_tiny", WIDE, ODD_VOCAB),
    "mixtral": arch_from_preset("mixtral_tiny", WIDE, ODD_VOCAB),
}
GRIDS = {
    "single": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp=2),
    "tp4": ParallelLayout(4, tp=4),
    "pp2": ParallelLayout(2, pp=2),
    "pp2_vpp2": ParallelLayout(2, pp=2, vpp=2),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2),
    "tp2_pp2_dp2": ParallelLayout(8, tp=2, pp=2),
    "uneven": ParallelLayout(2, pp=2, first_stage_layers=1),
}
EXPERT_GRIDS = {
    "ep2": ParallelLayout(2, ep=2),
    "tp2_etp2": ParallelLayout(2, tp=2, etp=2),
    "tp2_ep2_etp1": ParallelLayout(2, tp=2, ep=2, etp=1),
    "tp2_ep2_etp2": ParallelLayout(4, tp=2, ep=2, etp=2),
    "tp2_ep4_etp1_pp2": ParallelLayout(8, tp=2, ep=4, etp=1, pp=2),
    "ep2_pp2_vpp2_cp2": ParallelLayout(4, ep=2, pp=2, vpp=2, cp=2),
}


def random_model(arch, dtype="float32"):
    generator = torch.Generator().manual_seed(5)
    layout = hf_layout(arch, dtype)
    return {
        name: torch.randn(stored.shape, generator=generator).to(getattr(torch, dtype))
        for name, stored in layout.items()
    }


def write(folder, arch, grid, hf, dtype="float32"):
    folder.mkdir(parents=True)
    target = MegatronTarget(arch, grid, dtype)
    records = {}
    for file in target.files:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in filled(file.layout, hf).items()}
        records[file.name] = target.write(folder / file.name, file, tensors.items())
    target.finish(folder, json.loads(json.dumps(records)))
    return target


def read(folder, arch=None):
    with MegatronSource(folder, arch) as source:
        source.check()
        names = hf_layout(source.arch, "float32")
        return {name: source.read(name, full_region(stored.shape)) for name, stored in names.items()}


def grids_of(arch):
    return {**GRIDS, **(EXPERT_GRIDS if arch.moe else {})}


@pytest.mark.parametrize("name", MODELS)
def test_tensors_come_back_at_every_layout(name, tmp_path):
    arch = MODELS[name]
    hf = random_model(arch)
    for label, grid in grids_of(arch).items():
        write(tmp_path / label, arch, grid, hf)
        assert same(read(tmp_path / label), hf), label


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_back(dtype, tmp_path):
    arch = MODELS["qwen2_moe"]
    hf = random_model(arch, dtype)
    write(tmp_path / "out", arch, EXPERT_GRIDS["tp2_ep2_etp2"], hf, dtype)
    with MegatronSource(tmp_path / "out") as source:
        assert source.dtype("model.norm.weight") == dtype
    assert same(read(tmp_path / "out"), hf)


@pytest.mark.parametrize("name", ["biases, untied, one kv head", "qwen2_moe"])
def test_any_region_of_a_tensor_is_read(name, tmp_path):
    arch = MODELS[name]
    hf = random_model(arch)
    write(tmp_path / "out", arch, GRIDS["tp2_pp2"], hf)
    generator = torch.Generator().manual_seed(0)
    with MegatronSource(tmp_path / "out") as source:
        for key, tensor in hf.items():
            region = []
            for extent in tensor.shape:
                a, b = sorted(torch.randint(0, extent + 1, (2,), generator=generator).tolist())
                region.append((a, b) if a < b else (0, extent))
            assert torch.equal(source.read(key, tuple(region)), tensor[slices(tuple(region))]), key


def test_a_box_of_our_own_file_is_read_without_a_copy(tmp_path):
    arch = MODELS["qwen3_moe"]
    write(tmp_path / "out", arch, GRIDS["single"], random_model(arch))
    with MegatronSource(tmp_path / "out") as source:
        part = source.read("model.layers.1.mlp.experts.2.down_proj.weight", ((0, 8), (0, 4)))
        size = os.path.getsize(tmp_path / "out" / "__0_0.distcp")
        assert part.untyped_storage().nbytes() == size, "a view of the mapped file"


def test_only_what_one_box_holds_can_be_looked_at_and_all_can_be_copied_into_place(tmp_path):
    """At tp 2 and pp 2 a norm is one box, a matrix two."""
    arch = ARCHS["biases, tied"]
    hf = random_model(arch)
    write(tmp_path / "out", arch, GRIDS["tp2_pp2"], hf)
    looked_at = set()
    with MegatronSource(tmp_path / "out") as source:
        for name, tensor in hf.items():
            region = full_region(tensor.shape)
            found = source.view(name, region)
            if found is not None:
                assert torch.equal(found, tensor)
                looked_at.add(name)
            into = torch.full_like(tensor, 7.0)
            source.copy_into(into, name, region)
            assert torch.equal(into, tensor), name
            half = torch.empty_like(tensor, dtype=torch.bfloat16)
            source.copy_into(half, name, region)
            assert torch.equal(half, tensor.bfloat16()), name
    assert "model.norm.weight" in looked_at
    assert "model.embed_tokens.weight" not in looked_at


def test_copies_write_nothing(tmp_path):
    """World of 8 at TP2xPP2: only the first data-parallel rank of each place has a file."""
    target = MegatronTarget(MODELS["biases, tied"], GRIDS["tp2_pp2_dp2"], "float32")
    assert [file.name for file in target.files] == [f"__{rank}_0.distcp" for rank in (0, 1, 4, 5)]


# ---- Megatron itself

SAVES = [
    ("qwen2", ParallelLayout(4, tp=2, pp=2), {}),
    ("qwen2_untied", ParallelLayout(2, pp=2, vpp=2), {"non_homogeneous_layers": True}),
    ("qwen3_moe", ParallelLayout(4, tp=2, ep=2, etp=1, pp=2), {}),
    ("qwen2_moe", ParallelLayout(4, tp=2, ep=2), {}),
    ("qwen2_moe", ParallelLayout(2, ep=2), {"non_homogeneous_layers": True}),
    ("qwen2_moe", ParallelLayout(2, ep=2), {"singleton_local_shards": True}),
    ("mixtral", ParallelLayout(2, tp=2), {"singleton_local_shards": True}),
]
ALL = {**LIVE, **MIXTURES}


def boxes(folder):
    """(key, global shape, offsets, sizes, rank that wrote it) of what is no pickled object."""
    return {
        (key, tensor.shape, chunk.offsets, chunk.sizes, int(chunk.file.split("_")[2]))
        for key, tensor in read_contents(folder).tensors.items()
        for chunk in tensor.chunks
    }


@pytest.mark.parametrize(("name", "grid", "spelling"), SAVES)
def test_what_megatron_saved_is_read(name, grid, spelling, tmp_path):
    arch, folder = ALL[name], tmp_path / "iter_0000007"
    weights = run_ranks(grid.world_size, megatron_jobs.saved, folder, arch, grid, spelling)[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert same(read(tmp_path, arch), weights)
    with MegatronSource(folder, arch) as source:
        assert len(source.describe()["spelling"]) == 1 + bool(spelling.get("singleton_local_shards"))
    if not spelling:
        expected = {
            (shard.key, shard.global_shape, shard.offsets, shard.stored.view or shard.stored.shape, rank)
            for rank in range(grid.world_size)
            for shard in rank_shards(arch, grid, rank, dtype="float32")
        }
        renamed = {box for box in expected if "pre_mlp_layernorm" in box[0]}
        assert boxes(folder) == expected - renamed, "each rank writes the boxes that Megatron's rank writes"
        assert bool(renamed) == bool(arch.moe), "under TransformerEngine's key too"


LOADS = [
    ("qwen2", ParallelLayout(2, tp=2), ParallelLayout(2, pp=2, vpp=2)),
    ("qwen2", ParallelLayout(2, pp=2, vpp=2), ParallelLayout(4, tp=2, pp=2)),
    ("qwen2_untied", ParallelLayout(8, tp=4, pp=2), ParallelLayout(1)),
    ("llama", ParallelLayout(2, pp=2, first_stage_layers=1), ParallelLayout(2)),
    ("qwen3_moe", ParallelLayout(2, ep=2), ParallelLayout(4, tp=2, ep=2, etp=1, pp=2)),
    ("qwen2_moe", ParallelLayout(2, tp=2, etp=2), ParallelLayout(2, ep=2)),
    ("mixtral", ParallelLayout(8, tp=2, ep=4, etp=1, pp=2), ParallelLayout(4, tp=2, ep=2)),
]


@pytest.mark.parametrize(("name", "source", "target"), LOADS)
def test_megatron_loads_what_was_written(name, source, target, tmp_path):
    arch, folder = ALL[name], tmp_path / "out"
    hf = random_model(arch)
    write(folder, arch, source, hf)
    for found in run_ranks(target.world_size, megatron_jobs.loaded, folder, arch, target):
        assert same(found, hf)


def test_a_run_loads_what_was_written(tmp_path):
    arch, grid = ALL["qwen2"], ParallelLayout(2, tp=2)
    hf = random_model(arch)
    write(tmp_path / "out", arch, ParallelLayout(4, tp=2, pp=2), hf)
    for found in run_ranks(2, megatron_jobs.resumed, tmp_path / "out", arch, grid):
        assert same(found, hf)


def test_a_commit_of_a_run_is_read_without_being_told_the_model(tmp_path):
    arch, grid = ALL["qwen2"], ParallelLayout(4, tp=2, pp=2)
    weights = run_ranks(4, megatron_jobs.committed, tmp_path / "actor", arch, grid)[0]
    assert same(read(tmp_path), weights)
    with MegatronSource(tmp_path) as source:
        assert source.arch == arch
        assert source.describe()["not_read"]["tensors"] == 3 * len(source.describe()["tensors"]), "the optimizer's"


# ---- what is wrong


@pytest.fixture
def folder(tmp_path):
    arch = MODELS["biases, tied"]
    write(tmp_path / "out", arch, GRIDS["tp2"], random_model(arch))
    return tmp_path / "out"


def refusal(folder, arch=None, *, checked=True):
    with pytest.raises(UserError) as caught, MegatronSource(folder, arch) as source:
        if checked:
            source.check()
        for name, stored in hf_layout(source.arch, "float32").items():
            source.read(name, full_region(stored.shape))
    return str(caught.value)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("harm", ["truncated", "missing", "empty"])
def test_a_damaged_file_is_named(harm, checked, folder):
    file = folder / "__1_0.distcp"
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if harm == "empty" else file.read_bytes()[:-100])
    assert str(file) in refusal(folder, checked=checked)


def test_bytes_that_moved_are_named(folder):
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(b"\0" * 64 + data[:-64])
    message = refusal(folder)
    assert str(file) in message and "is damaged" in message


@pytest.mark.parametrize("checked", [True, False])
def test_a_box_that_points_at_another_ones_bytes_is_named(checked, folder):
    other = read_contents(folder).tensors["decoder.layers.mlp.linear_fc1.weight"].chunks[0]
    metadata = read_metadata(folder / METADATA)
    for index, info in metadata.storage_data.items():
        if index.fqn == KEY:
            info.relative_path, info.offset, info.length = other.file, other.start, other.num_bytes
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    message = refusal(folder, checked=checked)
    assert ("two tensors share the bytes" if checked else "does not match its checkpoint's .metadata") in message


@pytest.mark.parametrize("harm", ["missing", "garbage", "truncated", "another pickle"])
def test_broken_metadata_is_named(harm, folder):
    file = folder / METADATA
    if harm == "missing":
        file.unlink()
    elif harm == "another pickle":
        file.write_bytes(pickle.dumps({"a": 1}))
    else:
        file.write_bytes(b"no pickle" if harm == "garbage" else file.read_bytes()[:100])
    message = refusal(folder)
    assert str(folder) in message and ".metadata" in message


def changed(folder, change):
    metadata = read_metadata(folder / METADATA)
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    return refusal(folder)


def test_metadata_that_leaves_elements_out_is_refused(folder):
    message = changed(folder, lambda metadata: metadata.state_dict_metadata[KEY].chunks.pop())
    assert f"'{KEY}' lacks " in message and str(folder / METADATA) in message


def test_metadata_that_has_elements_twice_is_refused(folder):
    def change(metadata):
        chunks = metadata.state_dict_metadata[KEY].chunks
        chunks[-1] = chunks[0]

    assert f"'{KEY}' contains " in changed(folder, change)


def test_metadata_that_lacks_a_place_is_refused(folder):
    def change(metadata):
        metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != KEY}

    assert "is not the metadata of a distributed checkpoint" in changed(folder, change)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "sub/file"])
def test_metadata_does_not_lead_out_of_the_folder(name, folder):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    assert "is not a file of the checkpoint's folder" in changed(folder, change)


def test_shapes_that_disagree_with_the_config_are_named(folder):
    arch = arch_from_preset("qwen2_tiny", {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8,
                                           "num_key_value_heads": 2}, ODD_VOCAB)  # fmt: skip
    assert "'decoder.layers.mlp.linear_fc1.weight' has shape" in refusal(folder, arch)


@pytest.mark.parametrize(("name", "words"), [("q/k norm, head_dim apart, tied", "lacks"), ("unbiased", "has")])
def test_another_model_is_refused(name, words, folder):
    arch = MODELS.get(name)
    if arch is None:  # the same sizes without biases
        config = family_of(MODELS["biases, tied"]).arch_to_hf(MODELS["biases, tied"])
        arch = arch_from_config({**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    message = refusal(folder, arch)
    assert f"{words} " in message and "does not match the weights" in message


def test_a_checkpoint_without_a_config_says_what_to_do(folder):
    (folder / "config.json").unlink()
    assert "Copy the Hugging Face model's config.json" in refusal(folder)


def test_another_backend_is_refused(folder):
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "'zarr' backend" in refusal(folder)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    assert "is not a Megatron checkpoint" in refusal(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert "'iter_0000005'" in refusal(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../5")
    assert "expected the number of an iteration" in refusal(tmp_path)


def test_a_release_is_found(folder, tmp_path):
    shutil.move(folder, tmp_path / "save" / "release")
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("release")
    assert read(tmp_path / "save")


class Attack:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_checkpoint_cannot_carry_code(folder, tmp_path):
    metadata = read_metadata(folder / METADATA)
    metadata.planner_data = Attack(tmp_path / "harm")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    assert "mkdir', which is not data" in refusal(folder)
    assert not (tmp_path / "harm").exists()


def test_tensors_out_of_order_are_a_programming_error(tmp_path):
    target = MegatronTarget(MODELS["biases, tied"], GRIDS["single"], "float32")
    (file,) = target.files
    with pytest.raises(RuntimeError, match="expected .* next in"):
        target.write(tmp_path / "x", file, [("something", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="got 0 tensors"):
        target.write(tmp_path / "x", file, [])


def test_both_ends_go_to_another_process(tmp_path):
    arch = MODELS["qwen2_moe"]
    hf = random_model(arch)
    target = write(tmp_path / "out", arch, EXPERT_GRIDS["ep2"], hf)
    assert pickle.loads(pickle.dumps(target)).files == target.files
    with MegatronSource(tmp_path / "out") as source:
        name = "model.layers.0.self_attn.k_proj.weight"
        assert torch.equal(source.read(name, full_region(hf[name].shape)), hf[name])
        other = pickle.loads(pickle.dumps(source))
        assert torch.equal(other.read(name, ((3, 7), (0, 5))), hf[name][3:7, :5])
