"""Megatron's HybridDeviceOptimizer on a CPU: every parameter counts as one of the device, its copies as the host's.

The module asks tensors whether they are on a GPU, and pins copies; here both would be the CPU. Everything else of it
is Megatron's.
"""

import ast
import inspect

MODULE = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"


class _Rewrite(ast.NodeTransformer):
    def visit_If(self, node):
        if isinstance(node.test, ast.Attribute) and node.test.attr == "is_cuda":  # of a parameter, or of its copy
            node.test = ast.UnaryOp(ast.Not(), ast.Name("cpu_copy", ast.Load()))
        return self.generic_visit(node)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        return ast.copy_location(ast.Constant(True), node) if node.attr == "is_cuda" else node

    def visit_Call(self, node):
        self.generic_visit(node)
        pins = isinstance(node.func, ast.Attribute) and node.func.attr == "pin_memory"
        return node.func.value if pins else node


def correct(module):
    """Runs the module's source once more, as it is to be here."""
    torch = module.torch  # of `mrl.megatron.cpu.import_patches`
    tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(inspect.getsource(module))))
    exec(compile(tree, module.__file__, "exec"), module.__dict__)
    module.torch = torch
