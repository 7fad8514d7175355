from dataclasses import replace

import pytest

from mrl.commands.doctor.devices import Cpu, Gpu, check_cpu, check_gpus, check_hidden_gpus, read_cpu, read_gpus
from mrl.commands.doctor.finding import findings_of
from mrl.distributed.launcher_env import LauncherEnv

GPU = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 84_000_000_000, 85_000_000_000)
CPU = Cpu(16, None, frozenset({"avx2", "avx512f", "avx512_bf16"}))


def told(findings):
    return [(each.level, each.found) for each in findings]


def test_eight_alike_are_one_line():
    (only,) = told(check_gpus([GPU] * 8, LauncherEnv(world_size=8, local_world_size=8)))
    assert only == ("ok", "8 x NVIDIA H100 80GB HBM3, compute capability 9.0, 85 GB, free and working")


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        ({"error": "no kernel image"}, "problem", "does not compute: no kernel image"),
        ({"capability": (7, 0)}, "warning", "compute capability 7.0"),
        ({"free_bytes": 40_000_000_000}, "warning", "has 40.0 of 85.0 GB free"),
        ({"name": "NVIDIA A100"}, "warning", "devices of this host differ"),
    ],
)
def test_a_device_that_is_not_well_is_told(change, level, said):
    (only,) = told(check_gpus([GPU, replace(GPU, **change)], LauncherEnv()))
    assert only[0] == level and said in only[1]


def test_more_ranks_than_devices_is_a_problem():
    found = findings_of("GPUs", lambda: check_gpus([GPU], LauncherEnv(world_size=2, local_world_size=2)))
    assert found[0].level == "problem" and "2 ranks on this host, but torch sees 1 CUDA device(s)" in found[0].found


@pytest.mark.parametrize(
    ("files", "cuda", "hidden", "level"),
    [
        ([], None, None, "ok"),
        (["/dev/nvidia0"], None, None, "problem"),
        (["/dev/nvidia0"], "12.8", None, "problem"),
        (["/dev/nvidia0"], "12.8", "", "ok"),
        (["/dev/nvidia0"], "12.8", "3", "problem"),
    ],
)
def test_devices_that_torch_does_not_see(files, cuda, hidden, level):
    ((found, _),) = told(check_hidden_gpus(files, cuda, hidden))
    assert found == level


@pytest.mark.gpu
def test_the_devices_here_compute():
    gpus = read_gpus()
    assert gpus and [gpu.error for gpu in gpus] == [""] * len(gpus)


def test_this_cpu_is_read():
    cpu = read_cpu()
    assert cpu.cores >= 1 and cpu.flags


@pytest.mark.parametrize(
    ("cpu", "said"),
    [
        (replace(CPU, cores=4), "8 ranks share 4 core(s)"),
        (replace(CPU, quota=1.5), "8 ranks share 1.5 core(s)"),
        (replace(CPU, flags=frozenset({"sse4"})), "instructions: none of AVX2, AVX-512, SVE"),
        (replace(CPU, flags=frozenset({"avx2"})), "bfloat16 without bf16 instructions"),
    ],
)
def test_a_cpu_that_will_be_slow_is_told(cpu, said):
    found = told(check_cpu(cpu, 8, computes=True, dtype="bfloat16"))
    assert any(level == "warning" and said in text for level, text in found)
    assert told(check_cpu(CPU, 8, computes=True, dtype="bfloat16"))[0][0] == "ok"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_both_cgroups(files, quota, tmp_path):
    for name, text in files.items():
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    assert read_cpu(cgroup=tmp_path).quota == quota
