"""Internals of started engines for `tools/acceptance/`: stored tensors, devices and the probe's result.

`python -m mrl.engines.trtllm.inspection` prints the installed versions as JSON, in a separate process because importing
TensorRT-LLM starts MPI.
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
from mrl.engines.trtllm.logprob_probe import ProbeResult
from mrl.errors import first_line

NO_IMPORT = "does not import"
"""Prefix of the version text of a package that cannot be imported."""


def fused_qkv(engine: RolloutEngine, layer: int) -> Tensor | None:
    """Returns the fused [q; k; v] weight of a layer on this rank; None where the model has no tensor of that name.

    The name, `...layers.N.self_attn.qkv_proj.weight`, is that of TensorRT-LLM's PyTorch models; it was not checked in a
    running engine.
    """
    suffix = f"layers.{layer}.self_attn.qkv_proj.weight"
    found = [tensor for name, tensor in _model(engine).named_parameters() if name.endswith(suffix)]
    return found[0].detach() if len(found) == 1 else None


def devices(engine: RolloutEngine) -> list[str]:
    """Returns the devices of the model's parameters."""
    return sorted({str(tensor.device) for _, tensor in _model(engine).named_parameters()})


def is_llm(engine: RolloutEngine) -> bool:
    """Returns whether the engine uses the LLM API, whose model can be inspected."""
    return isinstance(engine, LlmEngine)


def without_graphs(engine: RolloutEngine) -> str | None:
    """Returns why the LLM API captured no CUDA graphs although requested; None if it did or for other engines."""
    return next(iter(engine._runtime.notes), None) if isinstance(engine, LlmEngine) else None


def probe_result(engine: RolloutEngine) -> ProbeResult | None:
    """Returns the probe's result about log-probabilities; None where this rank has not probed."""
    found: ProbeResult | None = getattr(engine, "_verdict", None)
    return found


def features(engine: RolloutEngine) -> str:
    """Returns the detected features of the installed package."""
    return str(engine._runtime.features) if isinstance(engine, LlmEngine) else ""


@contextmanager
def short_hang_timeout(engine: RolloutEngine, patience_s: float) -> Iterator[bool]:
    """Shortens the timeout of the engine's hang detector inside the block; yields whether there is one.

    Args:
        engine: Started engine.
        patience_s: Timeout of the hang detector, seconds.
    """
    detector = getattr(engine._runtime.executor, "hang_detector", None) if isinstance(engine, LlmEngine) else None
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
    """Collective over the replica: pauses the event loop of the LLM API inside the block; no-op for other engines."""
    with engine._runtime.paused() if isinstance(engine, LlmEngine) else nullcontext():
        yield


def _model(engine: RolloutEngine) -> Any:
    if not isinstance(engine, LlmEngine):
        raise TypeError(f"{type(engine).__name__} has no PyTorch model")
    return engine._runtime.executor.model_engine.model


def installed() -> dict[str, str]:
    """Returns the versions of packages that an acceptance run depends on."""
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
    print("\n" + json.dumps(installed()))  # noqa: T201 -- output of the command
