"""Imports point down, neighbours do not import each other, and heavy packages stay in their rooms."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from mrl.config import registry
from mrl.engines._capabilities import EngineCapabilities, engine_capabilities
from tests.source import PACKAGE, ROOT, imports, modules, name_of, tree_of

LAYERS = {
    "entry points": "__main__ > commands",
    "training loop": "train > trainer",
    "rollout pipeline": "rollout",
    "workers": "megatron engines",
    "logging and storage": "observability > checkpoint",
    "components": "resharding rewards environments algorithms data > models > distributed",
    "base": "config > types parallel_layout > errors",
}
"""Top to bottom, as README draws them. A part may import itself and what stands lower: in a lower layer, or behind a
`>` of its own."""

LAYOUT_FILES = [PACKAGE / "resharding" / f"{name}.py" for name in ("layout", "dist_checkpoint")]
"""They define what a cut tensor is made of."""

ROWS = [row.split() for layer in LAYERS.values() for row in layer.split(">")]
HEIGHT = {part: -place for place, row in enumerate(ROWS) for part in row}

ROOMS = {
    "megatron": ("mrl/megatron/",),
    "tensorrt_llm": ("mrl/engines/trtllm/",),
    "tensorrt": ("mrl/engines/trtllm/",),
    "vllm": ("mrl/engines/vllm/",),
}
"""Which files may import a package."""


ARCHITECTURE = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Architecture\n")[1].split("\n## ")[0]

NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def rows_of_readme() -> list[tuple[str, str, str, str]]:
    """Layer, name, "/" or ".py", and words of each row of the table; a row without a layer stands in the last one."""
    found, layer = [], ""
    for line in ARCHITECTURE.splitlines():
        if row := re.fullmatch(r"\| ([\w ]*?) ?\| `(\w+)(/|\.py)` \| (.+) \|", line):
            layer = row[1] or layer
            found.append((layer, row[2], row[3], row[4]))
    return found


def part_of(module: str) -> str:
    """mrl.resharding.plan -> resharding; the package itself -> ''"""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_part_of_the_package_has_a_layer():
    parts = {part_of(name_of(path)) for path in modules()} - {""}
    assert parts - set(HEIGHT) == set()


def test_readme_tells_every_room_in_the_order_of_the_layers():
    told = [(layer, name) for layer, name, _, _ in rows_of_readme()]
    assert told == [(layer, part) for layer, rows in LAYERS.items() for part in rows.replace(">", "").split()]
    assert {name + end for _, name, end, _ in rows_of_readme() if not (PACKAGE / (name + end)).exists()} == set()
    assert f" {NUMBERS[len(LAYERS)]} layers" in ARCHITECTURE


def test_readme_and_a_room_say_the_same_of_it():
    words = {name: text for _, name, end, text in rows_of_readme() if end == "/"}
    docs = {path.parent.name: ast.get_docstring(tree_of(path)) or "" for path in PACKAGE.glob("*/__init__.py")}
    said = {name: " ".join(doc.partition("\n\n")[0].split()).removesuffix(".") for name, doc in docs.items()}
    assert {name: text[:1].lower() + text[1:] for name, text in said.items()} == {
        name: text[:1].lower() + text[1:] for name, text in words.items()
    }


def test_files_of_the_drawing_exist():
    named = set(re.findall(r"[\w/]*\w(?:/|\.py)(?!\w)", ARCHITECTURE.split("```")[1]))
    assert len(named) > 8
    assert {name for name in named if not (PACKAGE / name).exists()} == set()


def test_imports_point_down():
    """No file imports its neighbours, or what stands above."""
    above, looked_at = {}, 0
    for path in modules():
        own = part_of(name_of(path))
        for target in imports(path):
            if target.split(".")[0] != "mrl":
                continue
            part = part_of(target)
            looked_at += part in HEIGHT
            if part in HEIGHT and part != own and HEIGHT[part] >= HEIGHT.get(own, 1):
                above.setdefault(f"{relative(path)} ({own})", set()).add(target)
    assert above == {}
    assert looked_at > 1000


def circle(imported: dict[str, set[str]]) -> list[str]:
    """Names that import each other in turn, [] where there are none."""
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_neither_rooms_nor_files_import_each_other():
    """Type checkers' imports count too. The package's own front door, `mrl`, opens onto everything."""
    names = {name_of(path): path for path in modules()}
    files, rooms = {}, {}
    for name, path in names.items():
        found = {target if target in names else target.rpartition(".")[0] for target in imports(path)}
        files[name] = (found & names.keys()) - {"mrl", name}
        rooms.setdefault(part_of(name), set()).update({part_of(target) for target in files[name]} - {part_of(name)})
    del rooms[""]
    assert len(files["mrl.train"]) > 5 < len(rooms["trainer"])
    assert circle(files) == circle(rooms) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_nothing_outside_the_engines_names_one():
    """A new engine is one folder. Only the translation of verl's arguments knows whose they are."""
    engines = registry.names("engines")
    folders = {f"mrl.engines.{name}" for name in engines}
    naming = {
        relative(path)
        for path in modules()
        for target in imports(path)
        if ".".join(target.split(".")[:3]) in folders and part_of(name_of(path)) != "engines"
    }
    assert naming == {"mrl/commands/from_verl/engine_arguments.py"}
    assert {name for name in engines if type(engine_capabilities(name)) is not EngineCapabilities} == set(engines)


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
    hands_some_on = "mrl/environments/program.py"
    assert readers <= {"mrl/distributed/launch.py", hands_some_on}


def test_only_weights_knows_how_tensors_are_cut():
    """Kinds of tensors are told apart, and pieces made, nowhere else; the tables name each row's kind."""
    made = {node.name for path in LAYOUT_FILES for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    assert {"Piece", "StoredTensor", "StackedPiece"} <= made
    knowing = set()
    for path in modules():
        for node in ast.walk(tree_of(path)):
            names_a_kind = (
                isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ShardKind"
            )
            cuts = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in made
            if names_a_kind or cuts:
                knowing.add(relative(path).split("/")[1])
    assert knowing == {"models", "resharding"}


TENSOR_NAME = re.compile(r"\w\.(weight|bias)$")


def test_only_weights_and_the_tables_spell_tensors_names():
    """Beside them only what looks into TensorRT-LLM's own modules, for `tools/acceptance/`."""
    spelling = {
        relative(path)
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and TENSOR_NAME.search(node.value)
    }
    assert {path for path in spelling if not path.startswith(("mrl/models/", "mrl/resharding/"))} <= {
        "mrl/engines/trtllm/inspection.py"
    }
    assert {"mrl/models/_decoder.py", "mrl/resharding/trtllm.py"} <= spelling


def test_no_assert_in_the_package():
    asserting = {relative(p) for p in modules() if any(isinstance(n, ast.Assert) for n in ast.walk(tree_of(p)))}
    assert asserting == set()


@cache
def modules_loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["mrl.config.config", "mrl.commands.cli", "mrl.trainer.validation.validate"])
def test_config_command_line_and_preflight_import_no_torch(module):
    assert not {"torch", "megatron", "transformers"} & modules_loaded_by(module)


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_training_imports_no_logger(package):
    pytest.importorskip(package)
    loaded = modules_loaded_by("mrl.train")
    assert "megatron" in loaded and package not in loaded


def test_each_guard_reads_the_whole_package():
    assert PACKAGE / "types.py" in modules() and len(modules()) > 20
