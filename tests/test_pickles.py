"""What could run code that somebody else wrote appears in named places only, each with its reason."""

import ast

from tests.source import ROOT, modules, tree_of

PLACES = {
    "mrl/checkpoint/formats/checkpoint_metadata.py": {
        "pickle": "an unpickler of metadata classes alone",
        "load": "weights_only",
    },
    "mrl/distributed/safe_pickle.py": {
        "pickle": "the unpickler of data that all object collectives have",
        "load": "weights_only",
    },
    "mrl/distributed/torchrun_rendezvous.py": {
        "pickle": "what torch's handler made in this process a moment ago, and gets back"
    },
    "mrl/checkpoint/formats/torch_blob.py": {"pickle": "written; read by an unpickler that knows tensors alone"},
    "mrl/checkpoint/formats/torch_dist.py": {"pickle": "written; read by checkpoint_metadata"},
    "mrl/config/values.py": {"pickle": "what this process made of its own schemas, copied"},
    "mrl/distributed/worker_processes/protocol.py": {
        "pickle": "from the parent to a process that it started; back comes JSON"
    },
    "mrl/distributed/worker_processes/sandbox.py": {
        "call": "code that a model wrote, in a process of its own that is confined before"
    },
    "mrl/megatron/checkpoint.py": {"pickle": "the name of its exception"},
}
"""File -> what it uses, and why nobody else's code runs."""

MODULES = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
CALLS = ("eval", "exec", "bcast", "gather", "allgather", "scatter")
"""Names of builtins that run text, and of mpi4py's calls that unpickle: those that do not begin with a capital."""


def uses(path):
    """(kind, line) of each use in a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (("pickle", node.lineno) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield "pickle", node.lineno
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load"):
                yield "load", node.lineno
            elif name in CALLS[:2] or (name.count(".") and name.rpartition(".")[2] in CALLS[2:] and "MPI" in name):
                yield "call", node.lineno
            if any(word.arg == "trust_remote_code" and ast.unparse(word.value) != "False" for word in node.keywords):
                yield "trust_remote_code", node.lineno


def test_each_use_has_its_reason():
    found = {
        path.relative_to(ROOT).as_posix(): {kind for kind, _ in uses(path)} for path in modules() if list(uses(path))
    }
    assert found == {file: set(kinds) for file, kinds in PLACES.items()}


def test_what_torch_loads_is_weights_only():
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert [ast.unparse(word) for word in node.keywords if word.arg == "weights_only"] == [
                    "weights_only=True"
                ], f"{path}:{node.lineno}"
