"""NVIDIA's own TransformerEngine Python on a CPU: `install` corrects the wheel's modules as they are imported.

The wheel `transformer-engine` is pure Python; its C++ extension is what needs a GPU. `extension/` stands in for that in
plain PyTorch, `permutation.py` for Triton kernels, `cuda.py` for `torch.cuda`. Everything between Megatron and the
kernels is NVIDIA's: FusedAdam, the layers of Megatron's TE spec, the choice of an attention backend, the ring of
context parallelism. Of Megatron one module sees a difference, the optimizer that works on device and host
(`hybrid.py`); nothing else does but the modules of `transformer_engine`. What is shown so are names, shapes, dtypes,
wiring and mathematics, not kernels: no FP8, no userbuffers, no CUDA graphs, no streams.
"""

import ast
import importlib.abc
import importlib.machinery
import os
import sys

from mrl.models import transformer_engine
from tests.megatron.te import cuda, hybrid, permutation

ROOT = "transformer_engine"
COMMON = "transformer_engine.common"
PERMUTATION = "transformer_engine.pytorch.triton.permutation"
NOT_HERE = ("transformer_engine.pytorch.triton.", "transformer_engine.pytorch.onnx_extensions")
"""Modules that need triton or onnxscript to be imported."""
ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # TE's own switch: `common` loads no CUDA library
    "NVTE_TORCH_COMPILE": "0",  # inductor's builds take seconds and gain nothing here
}
_CUDA = "_te_cuda"
"""The name under which a module of TE finds `tests.megatron.te.cuda`."""


def install():
    """Before the first import of either package; mrl then takes TE's layers on a CPU too, and in float32."""
    os.environ.update(ENVIRONMENT)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    transformer_engine.DEVICES = {*transformer_engine.DEVICES, "cpu"}
    transformer_engine.DTYPES = {*transformer_engine.DTYPES, "float32"}
    from mrl.megatron.cpu import import_patches  # prepares Megatron, for which TE must be usable already

    for finder in sys.meta_path:
        if isinstance(finder, import_patches._Finder):
            finder._fixes[hybrid.MODULE] = hybrid.correct


class _Rewrite(ast.NodeTransformer):
    """What TE's modules say that a CPU cannot do."""

    def visit_Constant(self, node):
        # a device, in defaults, calls and comparisons
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "is_cuda":  # asserted of every input
            node.attr = "is_cpu"
        if node.attr == "cuda" and _is_torch(node.value):
            return ast.copy_location(ast.Name(_CUDA, ast.Load()), node)
        return node

    def visit_ImportFrom(self, node):
        if node.module == "torch.cuda":
            node.module = cuda.__name__
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute):
            if called.attr == "cuda":  # tensor.cuda()
                called.attr = "cpu"
            if called.attr == "device" and _is_torch(called.value):  # torch.device("cuda", index): a CPU has no index
                del node.args[1:]
            # the ring of context parallelism waits twice for a request: with gloo the second wait never ends
            if called.attr in ("isend", "irecv", "batch_isend_irecv"):
                once = ast.Attribute(ast.Name(_CUDA, ast.Load()), "once", ast.Load())
                return ast.copy_location(ast.Call(once, [node], []), node)
        return node


class _RewriteAttention(_Rewrite):
    """Fused attention, and with it context parallelism, has no float32; comparisons to 1e-5 need it."""

    def visit_List(self, node):
        self.generic_visit(node)
        names = {item.attr for item in node.elts if isinstance(item, ast.Attribute)}
        if {"float16", "bfloat16"} <= names:
            node.elts.append(ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load()))
        return node


def _is_torch(node):
    return isinstance(node, ast.Name) and node.id == "torch"


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a module of TE from its corrected source; never reads or writes the wheel's bytecode."""

    def source_to_code(self, data, path, *, _optimize=-1):
        rewrite = _RewriteAttention() if "/attention/" in path else _Rewrite()
        tree = ast.fix_missing_locations(rewrite.visit(ast.parse(data)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module):
        if module.__name__ == PERMUTATION:
            module.__dict__.update(
                {name: value for name, value in vars(permutation).items() if not name.startswith("__")}
            )
        elif module.__name__.startswith(NOT_HERE):
            module.__getattr__ = cuda.missing(module.__name__)
        else:
            if module.__name__ not in (ROOT, COMMON):
                setattr(module, _CUDA, cuda)
            super().exec_module(module)
            if module.__name__ == COMMON:
                module.load_framework_extension = _load_extension


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _load_extension(framework):
    """In place of the shared object beside the wheel."""
    if framework != "torch":
        raise FileNotFoundError(f"Could not find shared object file for Transformer Engine {framework} lib.")
    from tests.megatron.te import extension

    sys.modules["transformer_engine_torch"] = extension
