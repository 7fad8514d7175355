"""Imports point down, neighbours do not import each other, and heavy packages stay in their rooms."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import PACKAGE, ROOT, imports, modules, name_of, tree_of

LAYERS = (
    ("__main__",),
    ("cli", "convert_cli"),
    ("rehearsal", "acceptance", "campaign"),
    ("train", "dryrun", "plan", "doctor", "from_verl"),
    ("fit", "durations", "doctor_checks"),
    ("memory",),
    ("engine_memory",),
    ("opening",),
    ("job",),
    ("prepare", "world_size"),
    ("preflight",),
    ("hub", "preflight_experts", "preflight_engine", "preflight_idle", "steps"),
    ("reference", "refit", "canary", "export", "rollout", "checkpoint", "supervised", "progress", "convert", "verify"),
    ("activations",),
    ("megatron", "engines", "observe"),
    ("formats",),
    ("transfer",),
    ("weights", "distributed", "rewards", "algorithms", "data"),
    ("verl_line",),
    ("config", "functional", "models"),
    ("values", "commit"),
    ("types", "registry", "grid", "keys", "paths", "hardware", "durable", "benchmark"),
    ("own_code", "peers", "yaml_file"),
    ("errors", "ending"),
)
"""Top to bottom. A part may import itself and what stands in a lower row."""

LAYOUT_FILES = [PACKAGE / "weights" / f"{name}.py" for name in ("layout", "dist_checkpoint")]
"""They define what a cut tensor is made of."""

HEIGHT = {part: -row for row, parts in enumerate(LAYERS) for part in parts}

ROOMS = {
    "megatron": ("mrl/megatron/", "mrl/distributed/device.py"),
    "tensorrt_llm": ("mrl/engines/trtllm/",),
    "tensorrt": ("mrl/engines/trtllm/",),
}
"""Which files may import a package."""


def part_of(module: str) -> str:
    """mrl.weights.plan -> weights; the package itself -> ''"""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_part_of_the_package_has_a_layer():
    parts = {part_of(name_of(path)) for path in modules()} - {""}
    assert parts - set(HEIGHT) == set()


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_point_down(path):
    own = part_of(name_of(path))
    above = set()
    for target in imports(path):
        if target.split(".")[0] != "mrl":
            continue
        part = part_of(target)
        if part in HEIGHT and part != own and HEIGHT[part] >= HEIGHT.get(own, 1):
            above.add(target)
    assert not above, f"{relative(path)} ({own}) imports from its own row or above"


@pytest.mark.parametrize("package", ROOMS)
def test_heavy_packages_stay_in_their_rooms(package):
    strangers = {
        relative(path)
        for path in modules()
        if any(target.split(".")[0] == package for target in imports(path))
        and not relative(path).startswith(ROOMS[package])
    }
    assert strangers == set()


def test_only_launch_reads_the_environment():
    readers = set()
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb"):
                readers.add(relative(path))
        if {"os.environ", "os.getenv"} & set(imports(path)):
            readers.add(relative(path))
    assert readers <= {"mrl/distributed/launch.py"}


def test_only_weights_knows_how_tensors_are_cut():
    """Kinds of tensors are told apart, and pieces made, nowhere else; the tables name each row's kind."""
    made = {node.name for path in LAYOUT_FILES for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    assert {"Piece", "StoredTensor", "StackedPiece"} <= made
    knowing = set()
    for path in modules():
        for node in ast.walk(tree_of(path)):
            names_a_kind = (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Kind"
            )
            cuts = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in made
            if names_a_kind or cuts:
                knowing.add(relative(path).split("/")[1])
    assert knowing == {"models", "weights"}


def test_no_assert_in_the_package():
    asserting = {relative(p) for p in modules() if any(isinstance(n, ast.Assert) for n in ast.walk(tree_of(p)))}
    assert asserting == set()


def modules_loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["mrl.config", "mrl.cli", "mrl.preflight"])
def test_config_command_line_and_preflight_import_no_torch(module):
    assert not {"torch", "megatron", "transformers"} & modules_loaded_by(module)


def test_each_guard_reads_the_whole_package():
    assert PACKAGE / "types.py" in modules() and len(modules()) > 20
