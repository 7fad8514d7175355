"""Parts of Megatron that give wrong numbers without an error are not used."""

import ast

import pytest

from tests.source import ROOT

WRONG = {
    "megatron.core.resharding": "copies the wrong experts; mrl moves weights by its own plan",
    "megatron.core.fusions.fused_cross_entropy": "casts the gradient to bf16, in fp32 too",
    "megatron.core.tensor_parallel.cross_entropy": "overwrites its input",
}
FILES = sorted((ROOT / "mrl").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_imports_what_is_wrong(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            assert not name.startswith(tuple(WRONG)), f"{name}: {WRONG}"
            assert not name.endswith("vocab_parallel_cross_entropy"), name
