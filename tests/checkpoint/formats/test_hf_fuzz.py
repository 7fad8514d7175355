"""Random damage to a Hugging Face folder: a UserError, or exactly the tensors that were there."""

import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.checkpoint.formats.hf import INDEX, HfSource, HfTarget
from mrl.commands.convert.convert import convert
from mrl.errors import UserError
from mrl.resharding.hf import hf_layout
from mrl.resharding.regions import full_region
from tests.checkpoint.formats.test_hf import write_folder
from tests.resharding.archs import counted, small

ARCH = small("qwen2_tiny", num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
EXPECTED = counted(ARCH)
FUZZ = settings(max_examples=200, deadline=None, database=None)
"""About 5 ms for each example."""


@pytest.fixture(scope="module")
def originals():
    """The files of a sharded folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").mkdir()
        write_folder(ARCH, Path(folder) / "in")
        with closing(HfSource(Path(folder) / "in")) as source:
            convert(source, HfTarget(ARCH, "float32", max_file_bytes=8000), Path(folder) / "out")
        return {
            path.name: path.read_bytes() for path in (Path(folder) / "out").iterdir() if path.name != "manifest.json"
        }


def header_bytes(data):
    return 8 + int.from_bytes(data[:8], "little")


def flipped(data, content, end):
    """`content` with up to four bytes before `end` changed."""
    changed = bytearray(content)
    places = st.tuples(st.integers(0, end - 1), st.integers(1, 255))
    for place, mask in data.draw(st.lists(places, min_size=1, max_size=4)):
        changed[place] ^= mask
    return bytes(changed)


def reads_or_refuses(files):
    """Nothing but a UserError may come out of a folder; what is read is right."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        try:
            with closing(HfSource(folder, ARCH)) as source:
                source.check()
                for name, stored in hf_layout(ARCH, "float32").items():
                    assert torch.equal(source.read(name, full_region(stored.shape)), EXPECTED[name]), name
        except UserError as error:
            assert folder in str(error)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_of_a_header(originals, data):
    files = dict(originals)
    name = data.draw(st.sampled_from(sorted(name for name in files if name.endswith(".safetensors"))))
    files[name] = flipped(data, files[name], header_bytes(files[name]))
    reads_or_refuses(files)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_of_the_index(originals, data):
    files = dict(originals)
    files[INDEX] = flipped(data, files[INDEX], len(files[INDEX]))
    reads_or_refuses(files)


@FUZZ
@given(data=st.data())
def test_files_that_are_cut_short_grown_or_gone(originals, data):
    files = dict(originals)
    name = data.draw(st.sampled_from(sorted(set(files) - {"config.json"})))
    how = data.draw(st.sampled_from(["cut", "grow", "remove"]))
    if how == "remove":
        del files[name]
    elif how == "grow":
        files[name] += data.draw(st.binary(min_size=1, max_size=64))
    else:
        files[name] = files[name][: data.draw(st.integers(0, len(files[name]) - 1))]
    reads_or_refuses(files)
