"""Acceptance run of a GPU: each check in its own process, on one rank or, with several GPUs, on two.

Selects the checks that can run, which of them run concurrently, and their models. The checks are in `gpu_checks.py` and
`gpu_commands.py`, the processes in `sessions.py`, and the page in `page.py`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata

import torch

from acceptance.gpu_table import CHECKS, COMMANDS
from acceptance.model import CONFIG, write_random
from acceptance.result import Check, Result
from acceptance.sessions import Sessions
from mrl import __version__
from mrl.distributed import launch
from mrl.errors import UserError

SHOWN = ("torch", "megatron-core", "transformer-engine", "flash-attn", "transformers")

EXPERTS = (
    "model.preset=qwen3_moe_tiny",
    "model.overrides={hidden_size: 512, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 128, num_experts: 16, num_experts_per_tok: 4, moe_intermediate_size: 256, vocab_size: 32000}",
)
LARGE = (
    "model.preset=qwen2_tiny",
    "model.overrides={hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: 12, num_attention_heads: 16, "
    "num_key_value_heads: 4, vocab_size: 32000, tie_word_embeddings: false, max_position_embeddings: 4096}",
    "train.batch_size=32",
    "rollout.prompt_length=1024",
    "rollout.response_length=1024",
    "actor.max_tokens_per_microbatch=8192",  # plain Megatron-Core keeps the scores of a microbatch in all layers
)
"""Overrides for models other than that of `CONFIG`; the user's overrides also apply to them."""


def chains(names: Sequence[str]) -> list[list[str]]:
    """Returns chains of checks that may run concurrently; each check of a chain reads the findings of the first."""
    found: dict[str, list[str]] = {}
    for name in [name for name in names if not CHECKS[name].alone]:
        first = CHECKS[name].after
        found.setdefault(first if first in names else name, []).append(name)
    return list(found.values())


@dataclass(kw_only=True)
class GpuAcceptance(Sessions):
    """Acceptance run of a GPU; see `Sessions` for more fields.

    Attributes:
        known: All checks by name.
        module: Module of the checks.
        checks: Names of the checks to run.
        device: "cuda", "cpu" or "auto".
        num_workers: Number of checks that run concurrently, out of those that measure neither time nor memory.
    """

    known: Mapping[str, Check] = field(default_factory=lambda: CHECKS)
    module: str = "acceptance.gpu_checks"
    checks: Sequence[str] = tuple(CHECKS)
    device: str = "cuda"
    num_workers: int = 1

    def __post_init__(self) -> None:
        """Chooses the device and creates the folders.

        Raises:
            UserError: The device does not exist, a check is unknown, or the folder already has a run.
        """
        try:
            self.device = launch.choose_device(self.device)
        except UserError as error:
            raise UserError(
                f"--device={self.device}, but torch sees no CUDA device. Use --device cpu to run the checks that apply "
                "to this machine's CPU."
            ) from error
        super().__post_init__()
        self.given = tuple(self.overrides)
        self.overrides = [f"run.device={self.device}", "run.num_threads=1"] if self.device == "cpu" else []

    @property
    def name(self) -> str:
        """Name of the device, as the subject of the results."""
        return self.device

    @property
    def versions(self) -> dict[str, str]:
        """Versions of relevant packages."""
        found = {"mrl": __version__}
        for name in SHOWN:
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
        return found | {"CUDA of torch": str(torch.version.cuda), "python": platform.python_version()}

    def run(self) -> list[Result]:
        """Runs all checks that measure neither time nor memory, `num_workers` at a time, then the others one by one.

        Returns:
            Results in the order of the page.

        Raises:
            UserError: The config is invalid.
        """
        (self.folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        (self.folder / self.name).mkdir()
        asked = []
        for name in [name for name in CHECKS if name in self.checks]:
            if CHECKS[name].num_ranks > (there := self._ranks()):
                needed = f"it needs {CHECKS[name].num_ranks} GPUs, there is {there}"
                self.give_up(self.name, [name], "skipped", needed)
            else:
                asked.append(name)
        models: dict[str, list[str]] = {
            model: self._model(model) for model in dict.fromkeys(CHECKS[name].model for name in asked)
        }
        try:
            self._in_parallel(chains(asked), models)
            for name in asked:
                if CHECKS[name].alone:
                    self._check(name, models)
        finally:
            self.results.sort(key=lambda result: list(CHECKS).index(result.check))
        return self.results

    def _in_parallel(self, chained: Sequence[Sequence[str]], models: Mapping[str, list[str]]) -> None:
        """Runs chains of checks concurrently; an interrupt by the user ends all of them."""
        with ThreadPoolExecutor(self.num_workers) as pool:
            running = [pool.submit(self._chain, names, models) for names in chained]
            try:
                for each in as_completed(running):
                    each.result()
            except BaseException:
                self.stop()
                pool.shutdown(cancel_futures=True)
                raise

    def _chain(self, names: Sequence[str], models: Mapping[str, list[str]]) -> None:
        for name in names:
            if not self.stopped:
                self._check(name, models)

    def _check(self, name: str, models: Mapping[str, list[str]]) -> None:
        check = CHECKS[name]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        alone = check.num_ranks == 1 or check.session == COMMANDS
        self.session(
            self.name,
            name,
            [name],
            [*models[check.model], *check.settings],
            launcher=() if alone else [*torchrun, "--nproc-per-node", str(check.num_ranks)],
            unstarted="fails",
        )

    def _ranks(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else max(check.num_ranks for check in CHECKS.values())

    def _model(self, model: str) -> list[str]:
        """Returns the overrides of a model; writes a folder with weights where transformers must read them."""
        sizes = {"dense": (), "experts": EXPERTS, "large": LARGE}[model]
        own = [*sizes, *self.given]
        if model == "large":
            return own
        return [*own, *write_random(self.load(own), self.folder / model)]
