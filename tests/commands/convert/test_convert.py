"""Conversions end to end on tiny models: the proof, interruptions, processes that share the work, damaged sources."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.checkpoint.formats.base import OutFile
from mrl.checkpoint.formats.hf import HfSource, HfTarget
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.checkpoint.io.partial_folder import PartialFolder
from mrl.commands.convert.command_line import common_dtype
from mrl.commands.convert.convert import convert, plan_conversion
from mrl.errors import UserError
from mrl.resharding.hf import hf_layout
from tests.checkpoint.formats.test_hf import write_folder
from tests.resharding.archs import ARCHS, counted, small

ARCH = ARCHS["biases, tied"]
FILE_BYTES = 40_000
"""Four files."""

KILL_STEP = 5
"""Every fifth of about 130 moments, prime to the number of steps in which a file is made."""


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is such a place: every file is forced to the disk, which takes its time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "in").mkdir()
    write_folder(ARCH, tmp_path / "in")
    return tmp_path / "in"


def run(model, folder, dtype="float32", **how):
    with HfSource(model) as source:
        target = HfTarget(source.arch, dtype, like=model, max_file_bytes=FILE_BYTES)
        return convert(source, target, folder, **how)


def content(folder):
    """File -> bytes; the manifest without the source's place and times."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert set(found) == {path.name for path in folder.iterdir()}
    manifest = json.loads(found.pop("manifest.json"))
    return found, manifest["target"]


def tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def in_child(work):
    """Runs `work` in a forked process; returns its wait status and what it raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 0
        try:
            work()
        except UserError as error:
            os.write(write, str(error).encode())
            status = 2
        except BaseException:  # noqa: BLE001 the parent sees it
            traceback.print_exc()
            status = 1
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), message


def test_the_target_holds_the_same_tensors_and_the_manifest_says_so(model, tmp_path):
    seen = []
    manifest = run(model, tmp_path / "out", progress=seen.append)
    expected = counted(ARCH)
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert sum(seen) == sum(t.nbytes for t in expected.values())
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    for side, folder in (("source", model), ("target", tmp_path / "out")):
        files = {path.name for path in folder.iterdir()} - {"manifest.json"}
        assert set(manifest[side]["files"]) == files
        for name, record in manifest[side]["files"].items():
            assert record == {"num_bytes": (folder / name).stat().st_size, "xxh3": xxh3_file(folder / name)}
    elements = sum(t.numel() for t in expected.values())
    assert manifest["bijection"]["hf_elements"] == manifest["bijection"]["stored_elements"] == elements
    assert manifest["dtype_changes"] == {}


def test_a_cast_is_counted_and_back_gives_the_cast_values(model, tmp_path):
    manifest = run(model, tmp_path / "half", "bfloat16")
    assert manifest["dtype_changes"] == {"float32 -> bfloat16": manifest["bijection"]["hf_elements"]}
    run(tmp_path / "half", tmp_path / "back", "float32")
    back = tensors(tmp_path / "back")
    assert all(torch.equal(back[name], t.bfloat16().float()) for name, t in counted(ARCH).items())


def test_each_tensor_may_have_its_own_dtype(model, tmp_path):
    with HfSource(model) as source:
        dtypes = {name: "float16" if "norm" in name else "float32" for name in counted(ARCH)}
        convert(source, HfTarget(source.arch, dtypes), tmp_path / "mixed")
    found = tensors(tmp_path / "mixed")
    assert {str(found[name].dtype).removeprefix("torch.") for name in dtypes} == {"float16", "float32"}
    assert json.loads((tmp_path / "mixed" / "config.json").read_text())["dtype"] == "float32"


def test_the_same_command_again_finds_its_work_done(model, tmp_path):
    first = run(model, tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    assert run(model, tmp_path / "out") == first
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before


def test_a_folder_of_something_else_is_left_alone(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(UserError, match=r"out' exists and was not made by this command"):
        run(model, tmp_path / "out")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "precious").write_text("")
    with pytest.raises(UserError, match=r"new.partial' exists and was not made by this command"):
        run(model, tmp_path / "new")
    run(model, tmp_path / "other")
    with pytest.raises(UserError, match=r"other' exists and was not made by this command"):
        run(model, tmp_path / "other", "bfloat16")


def kill_at(moment):
    """From now on this process dies by SIGKILL at its `moment`-th open, rename, mkdir or removal."""
    left = [moment]

    def hook(event, arguments):
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_nothing_that_looks_finished_and_continues(model, tmp_path):
    run(model, tmp_path / "whole")
    expected = content(tmp_path / "whole")
    killed = finished = moment = 0
    while not finished:
        moment += KILL_STEP
        out = tmp_path / f"out{moment}"

        def work(out=out, moment=moment):
            kill_at(moment)
            run(model, out)

        status, _ = in_child(work)
        assert status in (-signal.SIGKILL, 0)
        killed += status == -signal.SIGKILL
        finished = status == 0
        if out.exists():  # the last rename was done
            assert {path.name for path in out.iterdir() if path.is_file()} == {*expected[0], "manifest.json"}
        run(model, out)
        assert not out.with_name(out.name + ".partial").exists()
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.name in expected[0]} == expected[0]
    assert killed > 20


def stop_after(num_bytes, out):
    """A progress callback that dies once so many bytes are written and the source's hash, made in a thread, is kept."""
    left = [num_bytes]

    def progress(done):
        left[0] -= done
        if left[0] <= 0:
            while PartialFolder(out).record("source model.safetensors") is None:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def interrupted(model, out):
    status, _ = in_child(lambda: run(model, out, progress=stop_after(100_000, out)))
    assert status == -signal.SIGKILL
    partial = out.with_name(out.name + ".partial")
    assert not out.exists()
    assert not (partial / "config.json").exists() and not (partial / "manifest.json").exists()
    return sorted(partial.glob("*.safetensors"))


def test_files_that_are_done_are_kept_unless_they_are_damaged(model, tmp_path):
    done = interrupted(model, tmp_path / "out")
    assert len(done) == 2
    inodes = [path.stat().st_ino for path in done]
    data = bytearray(done[0].read_bytes())
    data[-1] ^= 1
    done[0].write_bytes(data)
    run(model, tmp_path / "out")
    run(model, tmp_path / "whole")
    assert content(tmp_path / "out")[0] == content(tmp_path / "whole")[0]
    names = [tmp_path / "out" / path.name for path in done]
    assert [path.stat().st_ino == inode for path, inode in zip(names, inodes, strict=True)] == [False, True]


def test_other_arguments_do_not_continue_it(model, tmp_path):
    interrupted(model, tmp_path / "out")
    with pytest.raises(UserError, match="started with other arguments: target.dtypes.float32 was 50, now it is None"):
        run(model, tmp_path / "out", "bfloat16")
    os.utime(model / "model.safetensors")
    with pytest.raises(UserError, match="started with other arguments: source.files.model.safetensors.mtime_ns was"):
        run(model, tmp_path / "out")


def test_a_source_with_other_bytes_of_the_same_age_does_not_continue_it(model, tmp_path):
    interrupted(model, tmp_path / "out")
    path = model / "model.safetensors"
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match="has changed since the conversion was started"):
        run(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_message_and_what_is_done_is_kept(model, tmp_path):
    def work():
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        run(model, tmp_path / "out")

    status, message = in_child(work)
    assert status == 2
    assert "cannot be written: File too large" in message and "\n" not in message
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").rglob("*.writing"))
    run(model, tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == counted(ARCH).keys()


@pytest.mark.parametrize("late_s", [0.0, 0.03, 0.06, 0.1])
def test_processes_that_start_together_or_late_share_the_files(model, tmp_path, late_s):
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                time.sleep(number * late_s)
                run(model, tmp_path / "out")
                os._exit(0)
            except BaseException:  # noqa: BLE001 the parent sees the status
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0, 0]
    assert not (tmp_path / "out.partial").exists()
    run(model, tmp_path / "alone")
    assert content(tmp_path / "out")[0] == content(tmp_path / "alone")[0]


def test_workers_write_the_same_files(model, tmp_path):
    manifest = run(model, tmp_path / "out", num_workers=2)
    assert manifest is not None
    run(model, tmp_path / "alone")
    assert content(tmp_path / "out") == content(tmp_path / "alone")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused_and_counted_where_it_is_allowed(value, tmp_path):
    (tmp_path / "in").mkdir()
    hf = counted(ARCH)
    hf["model.norm.weight"][3] = value
    write_folder(ARCH, tmp_path / "in", hf)
    with pytest.raises(UserError, match=r"1 values of 'model.norm.weight' are infinite or NaN"):
        run(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = run(tmp_path / "in", tmp_path / "allowed", allow_nan=True)
    assert manifest["not_finite"] == {"model.norm.weight": 1}


def test_values_that_a_narrower_dtype_cannot_hold_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    hf = counted(ARCH)
    hf = {name: tensor / 1e5 for name, tensor in hf.items()}
    hf["model.norm.weight"][:2] = 1e5
    write_folder(ARCH, tmp_path / "in", hf)
    with pytest.raises(UserError, match=r"2 values of 'model.norm.weight' \(from .*\) do not fit into float16"):
        run(tmp_path / "in", tmp_path / "out", "float16")


def test_a_target_that_lacks_a_tensor_is_a_defect_and_writes_nothing(model, tmp_path):
    with HfSource(model) as source:
        target = HfTarget(source.arch, "float32")
        (file,) = target.files
        layout = {name: stored for name, stored in file.layout.items() if name != "model.norm.weight"}
        target.files = (OutFile(file.name, layout),)
        with pytest.raises(RuntimeError, match="32 of 32 elements of 'model.norm.weight' are not stored"):
            convert(source, target, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_damaged_source_leaves_nothing(model, tmp_path):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        run(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_memory_stays_under_a_quarter_of_the_checkpoint(tmp_path):
    """180 MB with a cast, so that nothing is written straight from the mapped source."""
    arch = small("llama_tiny", hidden_size=1024, intermediate_size=1024, num_key_value_heads=8, vocab_size=8192)
    (tmp_path / "in").mkdir()
    write_folder(arch, tmp_path / "in", {name: torch.zeros(t.shape) for name, t in hf_layout(arch, "float32").items()})
    size = (tmp_path / "in" / "model.safetensors").stat().st_size

    def own_bytes():
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    seen = []
    before = own_bytes()
    with HfSource(tmp_path / "in") as source:
        target = HfTarget(arch, "bfloat16", max_file_bytes=size // 8)
        convert(source, target, tmp_path / "out", progress=lambda num_bytes: seen.append(own_bytes() - before))
        peak = plan_conversion(source, target).peak_bytes
    assert len(seen) == len(hf_layout(arch, "float32"))
    assert max(seen) < min(peak, size / 4)


def test_a_folder_that_lacks_a_tensor_is_refused_before_its_dtype_is_asked_for(tmp_path):
    tensors = counted(ARCH)
    del tensors["model.embed_tokens.weight"]
    (tmp_path / "in").mkdir()
    write_folder(ARCH, tmp_path / "in", tensors)
    with HfSource(tmp_path / "in") as source, pytest.raises(UserError, match="lacks 1 tensors"):
        common_dtype(source, "auto")


def test_tensors_of_layers_for_multi_token_prediction_are_counted(tmp_path):
    arch = small("deepseek_v3_tiny", num_key_value_heads=8)
    tensors = counted(arch)
    tensors |= {f"model.layers.{arch.num_layers}.{name}.weight": torch.ones(2) for name in ("enorm", "hnorm")}
    write_folder(arch, tmp_path, tensors)
    with HfSource(tmp_path) as source:
        assert source.num_left_out() == 2
