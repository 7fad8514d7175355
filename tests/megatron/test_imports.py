"""Parts of Megatron that give wrong numbers without an error are not used."""

import pytest

from tests.source import ROOT, imports, modules

WRONG = {
    "megatron.core.resharding": "copies the wrong experts; mrl moves weights by its own plan",
    "megatron.core.fusions.fused_cross_entropy": "casts the gradient to bf16, in fp32 too",
    "megatron.core.tensor_parallel.cross_entropy": "overwrites its input",
}


@pytest.mark.slow
def test_no_file_imports_what_is_wrong():
    imported = {(path, name) for path in modules() for name in imports(path)}
    assert any(name.startswith("megatron.core.") for _, name in imported)
    wrong = {
        f"{path.relative_to(ROOT)}: {name}": [why for part, why in WRONG.items() if name.startswith(part)]
        for path, name in imported
        if name.startswith(tuple(WRONG)) or name.endswith("vocab_parallel_cross_entropy")
    }
    assert wrong == {}
