"""The production configs: each one is a run that its ranks and its model allow, under the name that it has."""

import re
from pathlib import Path

import pytest

from mrl.commands.cli import main
from mrl.config.config import load
from mrl.engines.trtllm.fields import needs_mpi
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.run_plan import resolve
from tests.source import ROOT

NAME = re.compile(
    r"(?P<algorithm>[a-z]+)(?P<agent>-agent)?(?P<adapters>-lora)?_(?P<model>[^_]+)_(?P<nodes>\d+)x(?P<gpus>\d+)"
    r"(?:_(?P<layout>[a-z0-9]*\d))?(?:_(?P<engine>(?!roles)[a-z]+))?(?P<roles>_roles)?\.yaml"
)
FILES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if NAME.fullmatch(path.name)]

OF_TRTLLM = [path for path in FILES if not NAME.fullmatch(path.name)["engine"]]
OF_VLLM = [path for path in FILES if NAME.fullmatch(path.name)["engine"] == "vllm"]
OF_NATIVE = [path for path in FILES if NAME.fullmatch(path.name)["engine"] == "native"]
"""A config's name tells its engine, if not TensorRT-LLM, and `roles` where rollouts have ranks of their own."""

FEW_ROWS = 16
"""Sequences of full length that a replica has room for; with fewer, passes over its weights serve hardly any."""


def world_size(path: Path) -> int:
    """nodes x GPUs of a node, from the file's name."""
    found = NAME.fullmatch(path.name)
    return int(found["nodes"]) * int(found["gpus"])


def layout_name(grid: ParallelLayout) -> str:
    sizes = {"tp": grid.tp, "pp": grid.pp, "vpp": grid.vpp, "cp": grid.cp, "ep": grid.ep}
    return "".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def test_every_config_but_those_for_a_laptop_says_its_ranks_in_its_name():
    assert {path.name for path in (ROOT / "configs").glob("*.yaml")} - {path.name for path in FILES} == {
        "quickstart.yaml",
        "guessing.yaml",
        "calculator.yaml",
        "sums_smollm2.yaml",
        "sums_smollm2_lora.yaml",
    }
    assert [world_size(path) for path in FILES if "235b" in path.name] == [256]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_config_is_allowed_at_its_world_size_and_named_after_its_layout(file):
    found = resolve(load(file), world_size(file))
    name = NAME.fullmatch(file.name)
    assert (name["layout"] or "") == layout_name(found.grid)
    assert found.config.rollout.name == (name["engine"] or "trtllm")
    assert bool(name["roles"]) == found.grid.has_separate_rollout
    assert name["algorithm"] == ("opd" if found.teachers else found.config.algorithm.name)
    assert bool(name["adapters"]) == (found.config.actor.lora.rank > 0)
    assert bool(name["agent"]) == found.config.rollout.multi_turn.enable
    assert re.sub("[-_]", "", name["model"]) == re.sub("[-_]", "", found.config.model.preset)
    assert f"--world-size {world_size(file)}" in file.read_text()


@pytest.mark.parametrize("native", [False, True], ids=["own", "native"])
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_config_fits_its_gpus_and_samples_many_sequences_at_a_time(file, native, capsys):
    engine = "native" if native else load(file).rollout.name
    assert main(["plan", str(file), "--world-size", str(world_size(file)), f"rollout.name={engine}"]) == 0
    printed = capsys.readouterr().out
    assert ("TensorRT-LLM's own" in printed, "vLLM's own" in printed) == (engine == "trtllm", engine == "vllm")
    rows = int(re.search(r"the KV cache has room for (\d+) sequence", printed)[1])
    assert rows >= (1 if native else FEW_ROWS)


@pytest.mark.parametrize("file", OF_VLLM, ids=lambda path: path.name)
def test_a_config_has_the_room_that_its_comments_tell(file, capsys):
    text = file.read_text()
    assert main(["plan", str(file)]) == 0
    printed = capsys.readouterr().out
    told = re.search(
        r"# of what is free at vLLM's start: (\d+) GB are in use while it samples, of (\d+) that can be\n", text
    )
    of_samplers = printed.rpartition("a rank that samples")[2]
    in_use = re.search(r"total(?:, stage 0)? +[\d.]+ +([\d.]+)", of_samplers)[1]
    can_be = re.search(r"([\d.]+) of \d+ GB can be filled", printed)[1]
    assert [round(float(in_use)), round(float(can_be))] == [int(told[1]), int(told[2])]
    rows = re.search(r"room for (\d+) sequence", printed)[1]
    assert f"room for {rows} " in text


def test_the_config_of_the_native_engine_has_the_room_that_its_comments_tell(capsys):
    (file,) = OF_NATIVE
    assert main(["plan", str(file)]) == 0
    rows = re.search(r"room for (\d+) sequence", capsys.readouterr().out)[1]
    assert f"room for {rows} " in file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [32, 128, 256])
def test_the_config_of_the_native_engine_fits_other_numbers_of_nodes(nodes):
    (file,) = OF_NATIVE
    told = re.search(r"On 32 nodes: (\S+) (\S+)\n# (\S+)\. On 128 and 256 nodes: (\S+)\.", file.read_text()).groups()
    overrides = told[:3] if nodes == 32 else told[3:]
    assert main(["plan", str(file), "--world-size", str(8 * nodes), *overrides]) == 0


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_the_models_own_folder_takes_the_place_of_its_shape(file):
    switched = load(file, ["~model", "model.path=/models/mine", "~data", "data.train_files=train.jsonl"])
    assert (switched.model.preset, switched.model.overrides, switched.model.tokenizer) == (None, {}, None)
    assert switched.data.task is None and switched.data.train_files == ["train.jsonl"]
    assert "~model model.path=" in file.read_text() and "~data data.train_files=" in file.read_text()


@pytest.mark.parametrize("file", [path for path in FILES if "grpo" in path.name], ids=lambda path: path.name)
def test_a_dry_run_finds_nothing_and_says_how_the_config_is_started(file, tmp_path, capsys, monkeypatch):
    """Of dense models: to plan the copies of a mixture's refit takes long, and its mistakes `mrl plan` finds too."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(file), "--dry-run"]) == 0
    (start,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("start "))
    assert f"NPROC={world_size(file)} launch/mpirun.sh train" in start or needs_mpi(load(file).rollout) is False


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_config_whose_replicas_need_mpi_has_the_lines_that_start_it(file):
    nodes, text = int(NAME.fullmatch(file.name)["nodes"]), file.read_text()
    over_mpi = needs_mpi(load(file).rollout)
    by_mpirun = re.search(rf"NPROC=(\d+) MPIRUN_ARGS=.*launch/mpirun\.sh train \\\n#     configs/{file.name}\n", text)
    by_slurm = re.search(
        rf"MODE=srun SRUN_ARGS=--mpi=pmix sbatch --nodes=(\d+) --gpus-per-node=8 launch/slurm\.sbatch \\\n"
        rf"#     configs/{file.name}\n",
        text,
    )
    assert (by_mpirun is not None) == (by_slurm is not None) == over_mpi
    if by_mpirun and by_slurm:
        assert (int(by_mpirun[1]), int(by_slurm[1])) == (world_size(file), nodes)
    assert "rollout.name=native" in text


def test_roles_take_whole_nodes_and_split_no_replica_over_two():
    files = [path for path in FILES if path.stem.endswith("_roles")]
    assert {load(file).rollout.name for file in files} == {"trtllm", "vllm"}
    for file in files:
        grid = resolve(load(file), world_size(file)).grid
        assert grid.samplers.start % 8 == 0 and load(file).rollout.nnodes * 8 == len(grid.samplers)


@pytest.mark.slow
def test_the_largest_has_the_room_that_its_first_lines_tell(capsys):
    (file,) = (path for path in FILES if "235b" in path.name)
    told = re.search(r"room for (\d+) sequences of full length; in FP8 for (\d+):\n# (\S+) (\S+)\. ", file.read_text())
    for rows, overrides in ((told[1], ()), (told[2], told.groups()[2:])):
        assert main(["plan", str(file), *overrides]) == 0
        assert f"room for {rows} sequence(s)" in capsys.readouterr().out
