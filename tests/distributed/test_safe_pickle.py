"""Object collectives build data, whatever a rank, or who poses as one, sends."""

import io
import os
import pickle
import subprocess
import traceback
from collections import OrderedDict
from datetime import date
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import WriteItemType

from mrl.distributed.safe_pickle import RemoteError, SafeUnpickler, UnsafePickleError
from mrl.distributed.watchdog.watchdog import Watchdog
from mrl.errors import UserError
from mrl.types import Prompt
from tests.ranks import run_ranks


def through(value):
    return SafeUnpickler(io.BytesIO(pickle.dumps(value))).load()


class Payload:
    """Calls `function` where it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, b"x", ("y", {3, 4}), frozenset({5}), slice(1, 2)]},
        OrderedDict(a=Path("/x")), torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"),
        ChunkStorageMetadata(torch.Size([0]), torch.Size([4])), MetadataIndex("weight", [0], 1),
        TensorProperties(dtype=torch.float32), Prompt(3, [1, 2], "x", "5", {"day": date(2030, 1, 1)}),
    ],
    ids=repr,
)  # fmt: skip
def test_data_arrives_as_it_was(value):
    assert through(value) == value


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_arrives_under_the_name_of_each_python_version(module):
    assert SafeUnpickler(io.BytesIO(f"c{module}\nPosixPath\n(V/\nVx\ntR.".encode())).load() == Path("/x")


def test_a_member_of_an_enumeration_arrives_by_name_and_no_other_attribute_does():
    """As Python 3.11.0 to 3.11.3 pickle it."""
    assert through(Payload(getattr, WriteItemType, "TENSOR")) is WriteItemType.TENSOR
    for owner, name in ((WriteItemType, "mro"), (WriteItemType, "__class__"), (UserError, "mro"), (Path("/"), "rmdir")):
        with pytest.raises(UnsafePickleError, match="getattr"):
            through(Payload(getattr, owner, name))


def test_tensors_arrive_as_they_were():
    tensor = torch.arange(6.0).view(2, 3)
    assert torch.equal(through({"x": tensor})["x"], tensor)


def test_exceptions_arrive_and_no_foreign_class_is_called():
    for error in (UserError("a mistake"), OSError(28, "No space left on device"), KeyError("x")):
        told = through((error, traceback.extract_stack()))[0]
        assert type(told) is type(error) and told.args == error.args
    told = through(subprocess.CalledProcessError(3, "rm"))
    assert isinstance(told, RemoteError) and str(told) == "CalledProcessError: 3, rm"
    assert str(through(told)) == str(told)


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch harm"), (eval, "open('harm', 'w')"), (subprocess.Popen, ["touch", "harm"]),
        (getattr, os, "system"), (torch.load, "harm"), (Watchdog, None), (__import__, "antigravity"),
        (torch.hub.load, "a/b", "c"), (Path.touch, Path("harm")), (torch.Tensor.numpy, None),
    ],
    ids=lambda call: call[0].__qualname__,
)  # fmt: skip
def test_nothing_else_is_built_or_called(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(Payload(*call)) if call[0] is not getattr else b"cposix\nsystem\n(S'touch harm'\ntR."
    with pytest.raises(UnsafePickleError, match="which is not data"):
        SafeUnpickler(io.BytesIO(data)).load()
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_hides_a_pickle_is_refused(tmp_path):
    """A storage's bytes go to torch.load, which takes weights alone here."""
    inner = io.BytesIO()
    torch.save(Payload(os.mkdir, str(tmp_path / "harm")), inner)
    data = pickle.dumps(Payload(torch.storage._load_from_bytes, inner.getvalue()))
    with pytest.raises(pickle.UnpicklingError):
        SafeUnpickler(io.BytesIO(data)).load()
    assert not (tmp_path / "harm").exists()


def gather(mark):
    """What a rank says of a payload that the other one sends, by two collectives."""
    payload = Payload(os.mkdir, mark) if dist.get_rank() == 1 else None
    told = []
    for collective in (
        lambda: dist.all_gather_object([None, None], payload),
        lambda: dist.broadcast_object_list([payload], src=1),
    ):
        try:
            collective()
        except UnsafePickleError as error:
            told.append(str(error))
    return told


def test_ranks_build_data_only(tmp_path):
    told = run_ranks(2, gather, str(tmp_path / "harm"))
    assert [len(each) for each in told] == [2, 1] and "'posix.mkdir', which is not data" in told[0][0]
    assert not (tmp_path / "harm").exists()
