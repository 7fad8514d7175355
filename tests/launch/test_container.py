"""The recipe of the container: what it copies is there and is enough, its shell lines are sound, its lines run mrl."""

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

TEXT = (ROOT / "launch" / "Dockerfile.trtllm").read_text(encoding="utf-8")
KNOWN = {"ARG", "FROM", "SHELL", "WORKDIR", "COPY", "RUN"}


def instructions():
    """(word, rest) of each, with its continued lines put together."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", "", lines).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


FOUND = list(instructions())


def rests(word):
    return [rest for name, rest in FOUND if name == word]


def test_it_has_only_instructions_that_exist_and_starts_from_a_release_that_mrl_takes():
    assert {word for word, _ in FOUND} == KNOWN
    (image,), (start,) = rests("ARG"), rests("FROM")
    name, _, address = image.partition("=")
    assert start == f"${{{name}}}"
    version = re.fullmatch(r"nvcr\.io/nvidia/tensorrt-llm/release:([\d.]+)", address)[1]
    (extra,) = map(Requirement, setup_keyword("extras_require")["trtllm"])
    assert extra.specifier.contains(version)


def test_what_it_copies_is_there_and_enough_to_install(tmp_path):
    for rest in rests("COPY"):
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
    assert all((tmp_path / name).is_file() for name in setup_keyword("license_files"))


def test_extras_that_it_installs_exist():
    asked = re.findall(r'"\.\[(\w+)\]"', TEXT)
    assert len(asked) == 2 and set(asked) <= set(setup_keyword("extras_require"))


@pytest.mark.shellcheck
def test_shellcheck_finds_nothing_in_its_lines():
    (shell,) = rests("SHELL")
    assert shell == '["/bin/bash", "-euo", "pipefail", "-c"]'
    script = "\n".join(["#!/bin/bash", "set -euo pipefail", *rests("RUN")])
    done = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_sbatch_line_in_it_starts_ranks_in_the_image():
    told = re.search(r"#   (CONTAINER_IMAGE=.*?)\\\n#\s+sbatch (.*)", TEXT)
    variables = dict(word.split("=", 1) for word in shlex.split(told[1]))
    script = next(word for word in shlex.split(told[2]) if word.startswith("launch/"))
    job = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_CPUS_ON_NODE": "64", "SLURM_GPUS_ON_NODE": "8"}
    status, words, _ = dry_run(script.removeprefix("launch/"), **variables, **job)
    assert status == 0 and {"--ntasks=8", "--mpi=pmix", "--container-mounts=/shared:/shared"} <= set(words)
    assert f"--container-image={variables['CONTAINER_IMAGE']}" in words and "python3" in words
