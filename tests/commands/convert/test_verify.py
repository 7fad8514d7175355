"""The same weights in any two formats are found to be the same; one changed bit is found and named."""

import itertools
from contextlib import closing

import pytest
import torch

from mrl.checkpoint.formats.detect import open_source
from mrl.checkpoint.formats.hf import HfSource, HfTarget
from mrl.checkpoint.formats.megatron import MegatronSource, MegatronTarget
from mrl.checkpoint.formats.trtllm import TrtllmSource, TrtllmTarget
from mrl.commands.convert.convert import convert
from mrl.commands.convert.verify import verify
from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf import hf_layout
from mrl.resharding.trtllm import TrtllmMapping
from tests.checkpoint.formats.test_hf import write_folder
from tests.resharding.archs import counted, small

ARCH = small("qwen3_moe_tiny", moe_intermediate_size=16)
TENSOR = "model.layers.2.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Format -> a checkpoint of the same weights."""
    folder = tmp_path_factory.mktemp("same")
    (folder / "hf").mkdir()
    write_folder(ARCH, folder / "hf")
    with closing(HfSource(folder / "hf")) as source:
        convert(
            source, MegatronTarget(ARCH, ParallelLayout(4, tp=2, pp=2, ep=2, etp=1), "float32"), folder / "megatron"
        )
        convert(source, TrtllmTarget(ARCH, TrtllmMapping(4, 2, moe_ep_size=2), "float32"), folder / "trtllm")
        convert(source, HfTarget(ARCH, "bfloat16", max_file_bytes=50_000), folder / "half")
    return folder


def compare(a, b, **how):
    with closing(open_source(a)) as left, closing(open_source(b)) as right:
        return verify(left, right, **how)


def changed(folder, **changes):
    """A Hugging Face folder of the same weights, some changed by index."""
    hf = counted(ARCH)
    for name, (index, value) in changes.items():
        hf[name][index] = value
    folder.mkdir()
    write_folder(ARCH, folder, hf)
    return folder


@pytest.mark.parametrize("pair", [*itertools.combinations(("hf", "megatron", "trtllm"), 2)], ids="-".join)
def test_two_formats_of_the_same_weights_are_the_same(folders, pair):
    seen = []
    found = compare(*(folders / name for name in pair), progress=seen.append)
    expected = hf_layout(ARCH, "float32")
    assert found.same and found.first is None
    assert found.num_tensors == len(expected)
    assert found.num_elements == sum(seen) == sum(t.numel() for t in counted(ARCH).values())
    assert (found.different_tensors, found.different_elements) == (0, 0)


@pytest.mark.parametrize("name", ["megatron", "trtllm"])
def test_the_first_difference_is_named_with_both_values_and_all_are_counted(folders, name, tmp_path):
    other = changed(tmp_path / "other", **{TENSOR: ((slice(4, 6), 7), -1.5), "model.norm.weight": (3, 0.0)})
    found = compare(folders / name, other)
    original = float(counted(ARCH)[TENSOR][4, 7])
    assert not found.same
    assert (found.different_tensors, found.different_elements) == (2, 3)
    assert (found.first.tensor, found.first.index) == (TENSOR, (4, 7))
    assert found.first.a.startswith(f"{original:.9g} (float32, bits 0x")
    assert found.first.b == "-1.5 (float32, bits 0xbfc00000)"


def test_bits_count_not_values(folders, tmp_path):
    zero = changed(tmp_path / "zero", **{TENSOR: ((0, 0), 0.0)})
    minus = changed(tmp_path / "minus", **{TENSOR: ((0, 0), -0.0)})
    assert compare(zero, minus).different_elements == 1
    assert compare(zero, minus, atol=0.0).same


def test_another_dtype_differs_unless_a_tolerance_allows_it(folders):
    found = compare(folders / "hf", folders / "half")
    assert found.different_tensors == found.num_tensors
    assert (found.first.index, found.first.a, found.first.b) == (None, "float32", "bfloat16")
    assert compare(folders / "hf", folders / "half", rtol=2.0**-8).same
    assert not compare(folders / "hf", folders / "half", rtol=2.0**-12).same


def test_nan_is_equal_to_itself(folders, tmp_path):
    a, b = (changed(tmp_path / name, **{TENSOR: ((0, 0), torch.nan)}) for name in ("a", "b"))
    assert compare(a, b).same
    assert compare(a, b, atol=1.0).same
    assert compare(a, folders / "hf", atol=1.0).different_elements == 1


def test_models_of_different_structure_differ_by_tensor(folders, tmp_path):
    arch = small("qwen3_moe_tiny", moe_intermediate_size=16, num_hidden_layers=3)
    write_folder(arch, tmp_path, counted(arch))
    found = compare(folders / "hf", tmp_path)
    assert found.config == {"num_layers": (4, 3)}
    assert (found.first.a, found.first.b) == ("there", "missing") or found.first.index is not None
    assert found.different_tensors >= len(hf_layout(ARCH, "float32")) - len(hf_layout(arch, "float32"))


def test_copies_inside_a_checkpoint_that_differ_are_an_error(folders, tmp_path):
    with closing(open_source(folders / "hf")) as source:
        convert(source, TrtllmTarget(ARCH, TrtllmMapping(2), "float32"), tmp_path / "broken")
    path = tmp_path / "broken" / "rank1.safetensors"
    with closing(TrtllmSource(tmp_path / "broken")) as source:
        start = source._open_files[1].headers["transformer.ln_f.weight"].start
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="differs between rank 0"):
        compare(tmp_path / "broken", folders / "hf")


def test_the_format_is_found_by_the_files(folders, tmp_path):
    for name, kind in (("hf", HfSource), ("megatron", MegatronSource), ("trtllm", TrtllmSource)):
        with closing(open_source(folders / name)) as source:
            assert type(source) is kind
    with pytest.raises(UserError, match="nowhere' does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a Megatron checkpoint"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has a config.json, but neither model.safetensors nor"):
        open_source(tmp_path)
