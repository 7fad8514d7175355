"""A metadata pickle is read without running what it asks for."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from mrl.checkpoint.formats.checkpoint_metadata import COMMON_STATE, METADATA, read_common_state, read_metadata
from mrl.errors import UserError

MODULE = "megatron.core.dist_checkpointing.strategies.torch"


class ByName:
    """A member of an enumeration as Python 3.11.0 to 3.11.3 pickle it."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


class Attack:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def refusal(file):
    with pytest.raises(UserError) as caught:
        read_metadata(file)
    return str(caught.value)


def test_metadata_is_read(tmp_path):
    metadata = Metadata({"rng": BytesStorageMetadata()}, storage_data={MetadataIndex("rng"): None})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_metadata(tmp_path / ".metadata") == metadata


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_under_the_name_of_each_python_version(tmp_path, module):
    named = pickle.dumps(Metadata({}, planner_data="PLACE"), protocol=2)
    path = f"c{module}\nPosixPath\n(V/\nVx\ntR".encode()
    (tmp_path / ".metadata").write_bytes(named.replace(b"X\x05\x00\x00\x00PLACE", path))
    assert read_metadata(tmp_path / ".metadata").planner_data == Path("/x")


def test_members_of_enumerations_are_read_by_name_and_no_other_attribute_is(tmp_path):
    named = Metadata({}, planner_data=ByName(WriteItemType, "TENSOR"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(named))
    assert read_metadata(tmp_path / ".metadata").planner_data is WriteItemType.TENSOR
    for owner, name in ((WriteItemType, "mro"), (tmp_path, "rmdir")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=ByName(owner, name))))
        assert "getattr', which is not data" in refusal(tmp_path / ".metadata")


def test_code_is_refused_and_not_run(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "harm")))
    assert "mkdir', which is not data" in refusal(tmp_path / ".metadata")
    assert not (tmp_path / "harm").exists()


def test_classes_of_an_older_megatron_are_stood_in_for(tmp_path):
    """Pickles by hand: objects of a class that is not there, with one attribute."""
    text = f"ccopy_reg\n_reconstructor\n(c{MODULE}\nMCoreMetadata\nc__builtin__\nobject\nNtR.".encode()
    (tmp_path / ".metadata").write_bytes(text)
    assert "_reconstructor', which is not data" in refusal(tmp_path / ".metadata")
    text = b"\x80\x02" + f"c{MODULE}\nMCoreMetadata\n)\x81}}X\x01\x00\x00\x00aK\x01sb.".encode("latin-1")
    (tmp_path / ".metadata").write_bytes(text)
    found = read_metadata(tmp_path / ".metadata")
    assert isinstance(found, Metadata) and found.a == 1
    (tmp_path / ".metadata").write_bytes(text.replace(b"MCoreMetadata", b"MCoreAnything"))
    assert "MCoreAnything', which is not data" in refusal(tmp_path / ".metadata")


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"no pickle", "cannot be read"), (b"", "cannot be read"), (pickle.dumps([1]), "contains a list")],
)
def test_what_is_no_metadata_is_named(data, words, tmp_path):
    (tmp_path / ".metadata").write_bytes(data)
    assert words in refusal(tmp_path / ".metadata")
    assert "has no .other" in refusal(tmp_path / ".other")


def with_common_state(folder, value, *, name=COMMON_STATE):
    """A checkpoint folder whose shard file has `value` as its common state, behind other bytes."""
    data = io.BytesIO()
    torch.save([value], data)
    (folder / "__0_0.distcp").write_bytes(b"other" + data.getvalue() + b"behind")
    place = _StorageInfo("__0_0.distcp", len(b"other"), len(data.getvalue()))
    metadata = Metadata({name: BytesStorageMetadata()}, storage_data={MetadataIndex(name): place})
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def test_the_common_state_is_read_from_the_shards(tmp_path):
    with_common_state(tmp_path, {"num_updates": 3, "content_metadata": {"a": [1, None, "b"]}})
    assert read_common_state(tmp_path) == {"num_updates": 3, "content_metadata": {"a": [1, None, "b"]}}


def test_a_common_state_that_carries_code_is_refused_and_not_run(tmp_path):
    with_common_state(tmp_path, {"args": Attack(tmp_path / "harm")})
    with pytest.raises(UserError, match="cannot be read as data"):
        read_common_state(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_a_checkpoint_without_a_common_state_is_a_users_error(tmp_path):
    with_common_state(tmp_path, {}, name="another/shard_0_1")
    with pytest.raises(UserError, match="neither common.pt nor a common state"):
        read_common_state(tmp_path)
