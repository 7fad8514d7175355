"""The recipes of the containers: what each copies is there and enough, its shell lines are sound, its lines run mrl."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.launch.test_scripts import dry_run
from tests.source import ROOT
from tests.test_packaging import setup_keyword

RECIPES = {
    "trtllm": r"nvcr\.io/nvidia/tensorrt-llm/release:([\d.]+)",
    "vllm": r"vllm/vllm-openai:v([\d.]+)",
}
"""Engine, which is also its extra -> address of its release image."""

TEXTS = {name: (ROOT / "launch" / f"Dockerfile.{name}").read_text(encoding="utf-8") for name in RECIPES}
KNOWN = {"ARG", "FROM", "SHELL", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}

each_recipe = pytest.mark.parametrize("name", RECIPES)


def instructions(text):
    """(word, rest) of each, with its continued lines put together."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", "", lines).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


def rests(name, wanted):
    return [rest for word, rest in instructions(TEXTS[name]) if word == wanted]


def test_each_recipe_is_tested():
    assert {path.name for path in (ROOT / "launch").glob("Dockerfile*")} == {f"Dockerfile.{name}" for name in RECIPES}


@each_recipe
def test_it_has_only_instructions_that_exist_and_starts_from_a_release_that_mrl_takes(name):
    assert {word for word, _ in instructions(TEXTS[name])} <= KNOWN
    image, (start,) = rests(name, "ARG")[0], rests(name, "FROM")
    variable, _, address = image.partition("=")
    assert start == f"${{{variable}}}"
    version = re.fullmatch(RECIPES[name], address)[1]
    (extra,) = map(Requirement, setup_keyword("extras_require")[name])
    assert extra.specifier.contains(version)


@each_recipe
def test_what_it_copies_is_there_and_enough_to_install(name, tmp_path):
    for rest in rests(name, "COPY"):
        *sources, target = shlex.split(rest)
        for source in sources:
            place = tmp_path / target / source if target == "./" else tmp_path / target
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, place)
    done = subprocess.run(
        [sys.executable, "setup.py", "--name", "--version", "--license"], cwd=tmp_path, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.split()[0] == "mrl" and (tmp_path / "mrl" / "docs").is_dir()
    assert all((tmp_path / file).is_file() for file in setup_keyword("license_files"))


@each_recipe
def test_extras_that_it_installs_exist(name):
    asked = re.findall(r'"\.\[(\w+)\]"', TEXTS[name])
    assert len(asked) == 2 and set(asked) <= set(setup_keyword("extras_require"))


@pytest.mark.shellcheck
@each_recipe
def test_shellcheck_finds_nothing_in_its_lines(name):
    (shell,) = rests(name, "SHELL")
    assert shell == '["/bin/bash", "-euo", "pipefail", "-c"]'
    script = "\n".join(["#!/bin/bash", "set -euo pipefail", *rests(name, "RUN")])
    done = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@each_recipe
def test_the_sbatch_line_in_it_starts_ranks_in_the_image(name):
    told = re.search(r"#   (CONTAINER_IMAGE=.*?)\\\n#\s+sbatch (.*)", TEXTS[name])
    variables = dict(word.split("=", 1) for word in shlex.split(told[1]))
    script = next(word for word in shlex.split(told[2]) if word.startswith("launch/"))
    job = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_CPUS_ON_NODE": "64", "SLURM_GPUS_ON_NODE": "8"}
    status, words, _ = dry_run(script.removeprefix("launch/"), **variables, **job)
    expected = {"trtllm": {"--ntasks=8", "--mpi=pmix"}, "vllm": {"--ntasks=1"}}[name]
    assert status == 0 and expected | {"--container-mounts=/shared:/shared"} <= set(words)
    assert f"--container-image={variables['CONTAINER_IMAGE']}" in words and "python3" in words
