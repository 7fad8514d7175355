"""Reading Hugging Face folders that transformers wrote, into every kind of layout; and folders that are broken."""

import inspect
import json
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.hf import HfSource, HfTarget, load_from_hf, write_metadata_files
from mrl.commands.convert.convert import convert
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder, family_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_names import join, written_together
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from tests.resharding.archs import ARCHS, ODD_VOCAB, counted, filled, small

DENSE = {name: arch for name, arch in ARCHS.items() if arch.moe is None}
"""Models whose tensors have the same names in a folder and in transformers."""


def save_model(arch, folder, **how):
    """A folder as transformers saves it; returns its tensors."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # biases and norms too
    dtype = how.pop("dtype", torch.float32)
    model.to(dtype).save_pretrained(folder, **how)
    return model.state_dict()


def write_folder(arch, folder, tensors=None):
    """A single-file folder with the given tensors."""
    (folder / "config.json").write_text(json.dumps(family_of(arch).arch_to_hf(arch)))
    tensors = counted(arch) if tensors is None else tensors
    save_file(dict(join(tensors.items(), written_together(arch))), folder / "model.safetensors")


@pytest.mark.parametrize("arch", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_each_rank_gets_its_slices_of_what_transformers_saved(arch, shard_size, tmp_path):
    hf = save_model(arch, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert arch_from_folder(tmp_path) == arch
    grid = ParallelLayout(8, tp=4, pp=2)
    layouts = [megatron_layout(arch, grid, rank, dtype="float32", te=False) for rank in range(8)]
    layouts += [native_layout(arch, 2, rank, "float32") for rank in range(2)]
    for layout in layouts:
        tensors = allocate(layout)
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
        load_from_hf(tmp_path, arch, layout, tensors)
        for name, expected in filled(layout, hf).items():
            assert torch.equal(tensors[name], expected), name


def test_a_value_head_with_a_bias_is_refused_for_what_it_is(tmp_path):
    """verl's critics are transformers' token classification models, whose head has one."""
    config = transformers.AutoConfig.for_model(**family_of(ARCHS["biases, tied"]).arch_to_hf(ARCHS["biases, tied"]))
    config.num_labels = 1
    transformers.AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    with closing(HfSource(tmp_path)) as source, pytest.raises(UserError, match=r"value head has a bias, 'score\.bias'"):
        source.check()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_values_are_cast_to_the_tensors_dtype(stored, wanted, tmp_path):
    arch = ARCHS["biases, tied"]
    hf = save_model(arch, tmp_path, dtype=stored)
    layout = hf_layout(arch, wanted)
    tensors = allocate(layout)
    load_from_hf(tmp_path, arch, layout, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, hf[name].to(tensor.dtype)), name


def test_a_tied_model_may_come_with_its_head(tmp_path):
    arch = ARCHS["biases, tied"]
    hf = counted(arch)
    write_folder(arch, tmp_path, {**hf, "lm_head.weight": hf["model.embed_tokens.weight"].clone()})
    tensors = allocate(hf_layout(arch, "float32"))
    load_from_hf(tmp_path, arch, hf_layout(arch, "float32"), tensors)
    assert all(torch.equal(tensors[name], hf[name]) for name in tensors)


def test_a_tied_model_with_another_head_is_refused_by_every_reader(tmp_path):
    """transformers 5 takes the head of such a file, transformers 4 drops it: it is two models."""
    arch = ARCHS["biases, tied"]
    hf = counted(arch)
    head = hf["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    write_folder(arch, tmp_path, {**hf, "lm_head.weight": head})
    layout = native_layout(arch, 1, 0, "float32")
    with pytest.raises(UserError, match="'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        load_from_hf(tmp_path, arch, layout, allocate(layout))
    with closing(HfSource(tmp_path)) as source, pytest.raises(UserError, match="tie_word_embeddings"):
        convert(source, HfTarget(arch, "float32"), tmp_path / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight
    takes_the_head = Version(transformers.__version__) >= Version("5")
    assert torch.equal(read, head if takes_the_head else hf["model.embed_tokens.weight"])  # or the reason above is none


def weights(folder):
    return folder / "model.safetensors"


def saved(**changes):
    """Writes the model's tensors again with some replaced; None leaves one out."""

    def write(folder):
        tensors = {**load_file(weights(folder)), **{name.replace("__", "."): item for name, item in changes.items()}}
        save_file({name: item for name, item in tensors.items() if item is not None}, weights(folder))

    return write


def indexed(**changes):
    """Writes an index in which all tensors are in model.safetensors, with some entries replaced."""

    def write(folder):
        files = dict.fromkeys(load_file(weights(folder)), weights(folder).name)
        files |= {name.replace("__", "."): file for name, file in changes.items()}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return write


def index_text(text):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def renamed(new_name):
    """Stores the tensors under other names; those without one are left out."""

    def write(folder):
        tensors = {new_name(name): tensor for name, tensor in load_file(weights(folder)).items()}
        save_file({name: tensor for name, tensor in tensors.items() if name}, weights(folder))

    return write


def added(folder, name):
    (folder / name).write_bytes(b"{}")


DAMAGED = {
    "no weights": (
        lambda folder: weights(folder).rename(folder / "pytorch_model.bin"),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "garbage": (lambda folder: weights(folder).write_bytes(b"no weights at all"), "is not a complete safetensors file"),
    "empty": (lambda folder: weights(folder).write_bytes(b""), "is not a complete safetensors file"),
    "cut off": (
        lambda folder: weights(folder).write_bytes(weights(folder).read_bytes()[:-1000]),
        "is not a complete safetensors file",
    ),
    "tensor missing": (
        saved(model__norm__weight=None),
        "lacks 1 tensors, first 'model.norm.weight': config.json describes a qwen2 model with 4 layers",
    ),
    "tensor unknown": (
        saved(model__layers__4__experts=torch.zeros(1)),
        "has 1 unknown tensors, first 'model.layers.4.experts': config.json describes a qwen2 model with 4 layers",
    ),
    "vocabulary": (
        saved(model__embed_tokens__weight=torch.zeros(ODD_VOCAB + 3, 32)),
        "has shape [104, 32], but config.json requires [101, 32]; config.json has vocab_size=101",
    ),
    "shape": (
        saved(model__norm__weight=torch.zeros(33)),
        "'model.norm.weight' has shape [33], but config.json requires [32]",
    ),
    "integers": (
        saved(model__norm__weight=torch.zeros(32, dtype=torch.int8)),
        "'model.norm.weight' is stored as int8",
    ),
    "index is no json": (index_text("{"), "is not a safetensors index"),
    "index without map": (index_text('{"metadata": {}}'), "is not a safetensors index"),
    "index is a list": (index_text("[]"), "is not a safetensors index"),
    "index names a missing file": (
        indexed(model__norm__weight="more.safetensors"),
        "lists the file 'more.safetensors', which is not in the folder",
    ),
    "index leaves the folder": (indexed(model__norm__weight="../x/model.safetensors"), "which is not in the folder"),
    "two sets of weights": (
        lambda folder: (
            save_file(load_file(weights(folder)), folder / "model-00001-of-00001.safetensors"),
            indexed()(folder),
            index_text(
                (folder / "model.safetensors.index.json").read_text().replace("model.s", "model-00001-of-00001.s")
            )(folder),
        ),
        "has two sets of weights: model.safetensors, which transformers reads, and the shards of",
    ),
    "one of the shards is the single file": (
        lambda folder: (
            save_file({"model.norm.weight": torch.ones(32)}, folder / "more.safetensors"),
            indexed(model__norm__weight="more.safetensors")(folder),
        ),
        "has two sets of weights",
    ),
    "an adapter": (lambda folder: added(folder, "adapter_config.json"), "it has adapters for another model"),
    "two names of one tensor": (
        saved(norm__weight=torch.ones(32)),
        "are both the tensor 'model.norm.weight'",
    ),
    "names of another kind": (
        renamed(lambda name: f"transformer.{name}"),
        "unknown tensors, first 'transformer.model.",
    ),
    "index names a missing tensor": (
        indexed(lm_head__weight="model.safetensors"),
        "lists 'lm_head.weight' in 'model.safetensors', but it is not there",
    ),
}


@pytest.mark.parametrize("damage, message", DAMAGED.values(), ids=DAMAGED)
def test_a_broken_folder_ends_in_one_message_that_names_it(damage, message, tmp_path):
    arch = ARCHS["biases, tied"]
    write_folder(arch, tmp_path)
    damage(tmp_path)
    layout = native_layout(arch, 1, 0, "float32")
    with pytest.raises(UserError) as refusal:
        load_from_hf(tmp_path, arch, layout, allocate(layout))
    assert message in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("other", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors"])
def test_files_that_transformers_does_not_read_either_are_left_alone(other, tmp_path):
    arch = ARCHS["biases, tied"]
    write_folder(arch, tmp_path)
    added(tmp_path, other)
    indexed()(tmp_path)  # an index of the single file
    with HfSource(tmp_path) as source:
        source.check()


def equals(source, tensors):
    """Whether a source has these tensors."""
    source.check()
    for name, expected in hf_layout(source.arch, "float32").items():
        region = tuple((0, size) for size in expected.shape)
        assert torch.equal(source.read(name, region), tensors[name]), name
        assert source.dtype(name) == "float32"


MOE = {"num_key_value_heads": 2, "moe_intermediate_size": 24}
WITH_EXPERTS = {
    "qwen3_moe": small("qwen3_moe_tiny", **MOE),
    "qwen2_moe, shared expert, tied": small("qwen2_moe_tiny", **MOE),
    "mixtral": small("mixtral_tiny", num_key_value_heads=2),
}


@pytest.mark.parametrize("arch", WITH_EXPERTS.values(), ids=WITH_EXPERTS)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_experts_that_transformers_stores_together_are_read(arch, shard_size, tmp_path):
    if "save_original_format" not in inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters:
        pytest.skip("this version of transformers stores each expert by itself")
    save_model(arch, tmp_path / "each")
    save_model(arch, tmp_path / "fused", save_original_format=False, max_shard_size=shard_size)
    with HfSource(tmp_path / "fused") as source, HfSource(tmp_path / "each") as each:
        assert any(name.endswith("experts.gate_up_proj") for name in source._file_of)
        layout = hf_layout(arch, "float32")
        wanted = allocate(layout)
        each.check()
        each.fill(layout, wanted)
        equals(source, wanted)
        assert source.describe()["tensors"].keys() == each.describe()["tensors"].keys()


def test_fused_experts_of_another_shape_are_refused(tmp_path):
    arch = next(iter(WITH_EXPERTS.values()))
    save_model(arch, tmp_path, save_original_format=False)
    tensors = load_file(weights(tmp_path))
    name = next(name for name in tensors if name.endswith("experts.gate_up_proj"))
    tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, weights(tmp_path))
    with HfSource(tmp_path) as source, pytest.raises(UserError, match=f"'{name}' has shape"):
        source.check()


NAMES = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "compiled layers": lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
    "DDP": lambda name: f"module.{name}",
    "FSDP with checkpointing": lambda name: f"_fsdp_wrapped_module.{name}".replace(
        ".mlp.", "._checkpoint_wrapped_module.mlp."
    ),
    "AutoModel": lambda name: name.removeprefix("model."),
    "text model of one with a tower": lambda name: name.replace("model.", "model.language_model.", 1),
    "compiled AutoModel": lambda name: f"_orig_mod.{name.removeprefix('model.')}",
}


@pytest.mark.parametrize("new_name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("arch", [ARCHS["biases, tied"], *list(WITH_EXPERTS.values())[:1]], ids=["dense", "experts"])
def test_names_of_wrappers_and_of_base_models_are_read(new_name, arch, tmp_path):
    tensors = counted(arch)
    write_folder(arch, tmp_path, {new_name(name): tensor for name, tensor in tensors.items()})
    with HfSource(tmp_path) as source:
        equals(source, tensors)


def test_what_an_auto_model_of_transformers_saves_is_read_where_the_head_is_tied(tmp_path):
    arch = ARCHS["biases, tied"]
    expected = save_model(arch, tmp_path / "whole")
    transformers.AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    with HfSource(tmp_path / "base") as source:
        assert "norm.weight" in source._file_of
        equals(source, expected)


def test_an_untied_model_without_its_head_is_refused_by_what_it_is(tmp_path):
    arch = replace(ARCHS["biases, tied"], tie_word_embeddings=False)
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in counted(arch).items() if name != "lm_head.weight"
    }
    write_folder(arch, tmp_path, tensors)
    with HfSource(tmp_path) as source, pytest.raises(UserError, match="AutoModelForCausalLM"):
        source.check()


def test_tensors_that_do_not_fit_the_layout_are_a_defect_not_a_user_error(tmp_path):
    arch = ARCHS["biases, tied"]
    write_folder(arch, tmp_path)
    layout = native_layout(arch, 1, 0, "float32")
    tensors = allocate(layout)
    tensors["embed"] = tensors["embed"][:-1]
    with pytest.raises(RuntimeError, match=r"'embed' is \[100, 32\]"):
        load_from_hf(tmp_path, arch, layout, tensors)


MEMORY_SLACK_MIB = 32
"""Headers and the allocator's own; half of the largest piece, which therefore is not held twice."""


@pytest.mark.slow
def test_a_rank_holds_its_shard_never_the_model(tmp_path):
    """368 MiB of weights, a quarter for this rank; anonymous memory is watched while it loads."""
    arch = small("llama_tiny", hidden_size=1024, intermediate_size=1024, num_key_value_heads=8, vocab_size=32768)
    write_folder(arch, tmp_path, {name: torch.zeros(item.shape) for name, item in hf_layout(arch, "float32").items()})
    script = """
        import sys, threading, time
        import torch
        from mrl.parallel_layout import ParallelLayout
        from mrl.models.hf_config import arch_from_folder
        from mrl.checkpoint.formats.hf import load_from_hf
        from mrl.resharding.megatron import megatron_layout
        from mrl.resharding.dtypes import allocate

        def anonymous_mib():
            resident, shared = map(int, open("/proc/self/statm").read().split()[1:3])
            return (resident - shared) * 4096 / 2**20

        def watch():
            while running:
                seen.append(anonymous_mib())
                time.sleep(0.001)

        folder, running = sys.argv[1], True
        arch = arch_from_folder(folder)
        layout = megatron_layout(arch, ParallelLayout(4, tp=2, pp=2), 0, dtype="float32", te=False)
        tensors = allocate(layout)
        before, seen = anonymous_mib(), []
        thread = threading.Thread(target=watch)
        thread.start()
        load_from_hf(folder, arch, layout, tensors)
        running = False
        thread.join()
        print(max(seen) - before, sum(tensor.nbytes for tensor in tensors.values()) / 2**20)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, shard = map(float, result.stdout.split())
    model = (tmp_path / "model.safetensors").stat().st_size / 2**20
    assert shard < model / 3
    assert grown < shard + MEMORY_SLACK_MIB < model / 2


def test_layer_types_of_a_window_as_long_as_the_context_are_not_copied(tmp_path):
    """mrl has no such window, so the new folder says that no layer has one."""
    arch = small("qwen2_tiny", num_hidden_layers=2)
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    windows = {
        "use_sliding_window": True,
        "sliding_window": arch.max_position_embeddings,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    (source / "config.json").write_text(json.dumps({**family_of(arch).arch_to_hf(arch), **windows}))
    assert arch_from_folder(source) == arch
    write_metadata_files(target, arch, {"model.safetensors": hf_layout(arch, "float32")}, like=source)
    assert arch_from_folder(target) == arch
