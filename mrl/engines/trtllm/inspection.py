"""What is inside the started engines, for `tools/acceptance/`: stored tensors, devices, and what the probe found.

Nothing here is used in a run. `python -m mrl.engines.trtllm.inspection` prints what is installed as JSON, in a process
of its own, since importing TensorRT-LLM starts MPI.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from mrl import __version__
from mrl.engines.base import RolloutEngine
from mrl.engines.trtllm.engine import LlmEngine
from mrl.engines.trtllm.logprob_probe import Verdict
from mrl.errors import first_line

NO_IMPORT = "does not import"
"""How the version of a package begins that has none."""


def fused_qkv(engine: RolloutEngine, layer: int) -> Tensor | None:
    """[q; k; v] of a layer as TensorRT-LLM's module stores it on this rank; None: it has no tensor of that name.

    The name, `...layers.N.self_attn.qkv_proj.weight`, is that of its PyTorch models; it was not seen running.
    """
    suffix = f"layers.{layer}.self_attn.qkv_proj.weight"
    found = [tensor for name, tensor in _model(engine).named_parameters() if name.endswith(suffix)]
    return found[0].detach() if len(found) == 1 else None


def devices(engine: RolloutEngine) -> list[str]:
    """Where the model's parameters are."""
    return sorted({str(tensor.device) for _, tensor in _model(engine).named_parameters()})


def is_llm(engine: RolloutEngine) -> bool:
    """Whether the LLM API runs it, whose model can be looked into."""
    return isinstance(engine, LlmEngine)


def without_graphs(engine: RolloutEngine) -> str | None:
    """Why the LLM API captured no CUDA graphs that were asked for; None: it has them, or is another engine."""
    return next(iter(engine._host.notes), None) if isinstance(engine, LlmEngine) else None


def verdict(engine: RolloutEngine) -> Verdict | None:
    """What the probe found out about log-probabilities; None: nobody asked on this rank."""
    found: Verdict | None = getattr(engine, "_verdict", None)
    return found


def features(engine: RolloutEngine) -> str:
    """What mrl found the installed package to have."""
    return str(engine._host.features) if isinstance(engine, LlmEngine) else ""


@contextmanager
def impatient(engine: RolloutEngine, patience_s: float) -> Iterator[bool]:
    """Inside, the engine's hang detector fires after `patience_s` instead of its own time; False: there is none."""
    detector = getattr(engine._host.executor, "hang_detector", None) if isinstance(engine, LlmEngine) else None
    if detector is None:
        yield False
        return
    own, detector.timeout = detector.timeout, patience_s
    try:
        yield True
    finally:
        detector.timeout = own


@contextmanager
def paused(engine: RolloutEngine) -> Iterator[None]:
    """Collective over the replica: inside, the event loop of the LLM API waits; another engine has none."""
    with engine._host.paused() if isinstance(engine, LlmEngine) else nullcontext():
        yield


def _model(engine: RolloutEngine) -> Any:
    if not isinstance(engine, LlmEngine):
        raise TypeError(f"{type(engine).__name__} has no PyTorch model")
    return engine._host.executor.model_engine.model


def installed() -> dict[str, str]:
    """Versions of what an acceptance run depends on."""
    found = {"mrl": __version__}
    for name in ("tensorrt_llm", "tensorrt"):
        try:
            module = importlib.import_module(name)
            found[name] = str(getattr(module, "__version__", "unknown"))
            found[f"{name} is in"] = os.path.dirname(str(module.__file__))
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            found[name] = f"{NO_IMPORT}: {first_line(error)}"
    for name in ("megatron-core", "transformers", "transformer-engine", "mpi4py"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found |= {"torch": torch.__version__, "CUDA of torch": str(torch.version.cuda), "python": platform.python_version()}
    for index in range(torch.cuda.device_count()):
        found[f"GPU {index}"] = torch.cuda.get_device_name(index)
    if not torch.cuda.is_available():
        found["GPU"] = "none"
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(installed()))  # noqa: T201 -- it is what the command is for
