"""Reading Hugging Face folders that transformers wrote, into every kind of layout; and folders that are broken."""

import json
import subprocess
import sys
import textwrap
from contextlib import closing

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from mrl.convert.convert import convert
from mrl.errors import UserError
from mrl.formats.hf import HfSource, HfTarget, load_from_hf
from mrl.grid import Grid
from mrl.models.hf_config import arch_from_folder, family_of
from mrl.weights.hf import hf_layout
from mrl.weights.megatron import megatron_layout
from mrl.weights.native import native_layout
from mrl.weights.tensors import allocate
from tests.weights.archs import ARCHS, ODD_VOCAB, counted, filled, small


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
    save_file(counted(arch) if tensors is None else tensors, folder / "model.safetensors")


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_each_rank_gets_its_slices_of_what_transformers_saved(arch, shard_size, tmp_path):
    hf = save_model(arch, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert arch_from_folder(tmp_path) == arch
    grid = Grid(8, tp=4, pp=2)
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


DAMAGED = {
    "no weights": (
        lambda folder: weights(folder).rename(folder / "pytorch_model.bin"),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "garbage": (lambda folder: weights(folder).write_bytes(b"no weights at all"), "is not a whole safetensors file"),
    "empty": (lambda folder: weights(folder).write_bytes(b""), "is not a whole safetensors file"),
    "cut off": (
        lambda folder: weights(folder).write_bytes(weights(folder).read_bytes()[:-1000]),
        "is not a whole safetensors file",
    ),
    "tensor missing": (
        saved(model__norm__weight=None),
        "lacks 1 tensors of a qwen2 model with 4 layers, first 'model.norm.weight'",
    ),
    "tensor unknown": (
        saved(model__layers__4__experts=torch.zeros(1)),
        "has unknown 1 tensors of a qwen2 model with 4 layers, first 'model.layers.4.experts'",
    ),
    "vocabulary": (
        saved(model__embed_tokens__weight=torch.zeros(ODD_VOCAB + 3, 32)),
        "has shape [104, 32], but config.json asks for [101, 32]; config.json says vocab_size=101",
    ),
    "shape": (
        saved(model__norm__weight=torch.zeros(33)),
        "'model.norm.weight' has shape [33], but config.json asks for [32]",
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
        "names the file 'more.safetensors', which is not in the folder",
    ),
    "index leaves the folder": (indexed(model__norm__weight="../x/model.safetensors"), "which is not in the folder"),
    "index names a missing tensor": (
        indexed(lm_head__weight="model.safetensors"),
        "says that 'lm_head.weight' is in 'model.safetensors', but it is not",
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


def test_a_rank_holds_its_shard_never_the_model(tmp_path):
    """368 MiB of weights, a quarter for this rank; anonymous memory is watched while it loads."""
    arch = small("llama_tiny", hidden_size=1024, intermediate_size=1024, num_key_value_heads=8, vocab_size=32768)
    write_folder(arch, tmp_path, {name: torch.zeros(item.shape) for name, item in hf_layout(arch, "float32").items()})
    script = """
        import sys, threading, time
        import torch
        from mrl.grid import Grid
        from mrl.models.hf_config import arch_from_folder
        from mrl.formats.hf import load_from_hf
        from mrl.weights.megatron import megatron_layout
        from mrl.weights.tensors import allocate

        def anonymous_mib():
            resident, shared = map(int, open("/proc/self/statm").read().split()[1:3])
            return (resident - shared) * 4096 / 2**20

        def watch():
            while running:
                seen.append(anonymous_mib())
                time.sleep(0.001)

        folder, running = sys.argv[1], True
        arch = arch_from_folder(folder)
        layout = megatron_layout(arch, Grid(4, tp=2, pp=2), 0, dtype="float32", te=False)
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
