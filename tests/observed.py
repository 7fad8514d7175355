"""What a config makes of the real code, as plain values: two configs that differ only in a field that is ignored agree.

    course(*overrides)     a few steps in this process: metrics, tokens, engine and optimizer, operators that ran
    files(*overrides)      a whole run: what is in its folder and on the terminal
    laid(*overrides)       who holds what on several ranks, and what Megatron is told; starts nothing
    read(*overrides)       the prompts and the responses to imitate
    bounds(*overrides)     when a process of the run must have ended

Overrides are added to CONFIG. A refusal is {"refused": message}. Times and sizes of free memory are left out.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.config.config import Config, load
from mrl.data.prompts import load_training, load_validation
from mrl.distributed.local_ranks import TRAINING
from mrl.distributed.watchdog.graceful_stop import Stop, limits
from mrl.engines._capabilities import memory_plan
from mrl.errors import UserError
from mrl.megatron import quieten
from mrl.megatron.critic import Critic
from mrl.megatron.model import transformer_config
from mrl.observability.metrics import is_wall_clock
from mrl.resharding.megatron import megatron_layouts
from mrl.train import run_step, run_validation, train, warm_start
from mrl.trainer.run_plan import build_run_plan, resolve
from mrl.trainer.startup import open_trainer
from mrl.trainer.supervised import examples
from mrl.trainer.trainer import Trainer

CONFIG = """
run: {seed: 3, num_threads: 1}
model:
  preset: qwen2_tiny
  overrides:
    {hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16, num_attention_heads: 2, num_key_value_heads: 2}
  tokenizer: "char:0123456789<>+#"
  dtype: float32
data: {task: addition, task_kwargs: {min_terms: 2, max_terms: 3, max_value: 9, num_val: 3, num_train: 8}}
train: {num_steps: 1, batch_size: 4, minibatch_size: 2}
actor: {lr: 1.0e-2, max_tokens_per_microbatch: 64}
rollout: {n: 2, prompt_length: 12, response_length: 8, max_num_seqs: 16}
reward: {functions: [{name: exact_match}, {name: length, weight: 0.1, kwargs: {target: 2, limit: 8}}]}
observe: {console: "off", tensorboard: false, report: false}
"""
GIVEN = yaml.safe_load(CONFIG)  # once: reading the text takes a quarter of a load

Facts = dict[str, Any]


class Operators(TorchDispatchMode):
    """Counts operators, and the elements that they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.elements = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the wrapper that keeps the compiler away takes as long as most operators."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += 1
        self.elements += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def of_a_config(observe: Callable[[Config], Facts]) -> Callable[..., Facts]:
    """Facts by overrides, each set of them observed once."""

    @cache
    @wraps(observe)
    def facts(*overrides: str) -> Facts:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return observe(load(GIVEN, [f"run.output_dir={folder}/run", *overrides]))
            except UserError as error:
                return {"refused": str(error)}

    return facts


_imported = [0]
"""Modules when garbage was last set aside."""


def _settle() -> None:
    """Megatron and mrl collect garbage again and again: what there is from the start, modules above all, is left out.

    So are modules that a run before has imported.
    """
    if not _imported[0]:
        quieten()
        for name in TRAINING:
            importlib.import_module(name)
    if len(sys.modules) > _imported[0]:
        _imported[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


@of_a_config
def course(config: Config) -> Facts:
    """The steps of a run without its commits."""
    _settle()
    with open_trainer(build_run_plan(config), log=False) as trainer:
        trainer.resume()
        warm_start(trainer)
        trainer.init_reference_and_critic(0)
        facts: Facts = {"threads": torch.get_num_threads(), **_held_out(trainer)}
        step = 0
        while not trainer.is_last(step):
            step += 1
            with Operators() as ran, trainer.progress.step(step):
                metrics = run_step(trainer, step)
            facts |= {f"{step} {name}": value for name, value in metrics.items() if not is_wall_clock(name)}
            facts |= {
                f"{step} engine {name}": value
                for name, value in trainer.rollout_worker.engine.stats().items()
                if name[-2:] != "_s"
            }
            facts |= {f"{step} operators": (ran.count, ran.elements)}
        return facts | {"steps": step, "position": trainer.state.source.position, **_machinery(trainer)}


def _held_out(trainer: Trainer) -> Facts:
    if not trainer.validation:
        return {}
    metrics, rollouts = run_validation(trainer)
    kept = {name: value for name, value in metrics.items() if not is_wall_clock(name)}
    return {**kept, "held out": [(rollout.response_ids, rollout.finish_reason) for rollout in rollouts]}


def _machinery(trainer: Trainer) -> Facts:
    """What stands behind the numbers: kinds, sizes, what is asleep."""
    optimizer = trainer.actor.optimizer
    asleep = getattr(trainer.rollout_worker.engine, "_cache").allocated_bytes  # noqa: B009
    trainer.actor.offload()
    return {
        "optimizer": type(optimizer.chained_optimizers[0]).__name__,
        "updates": trainer.actor.num_updates,
        "gradients reduced in the backward": trainer.actor.chunks[0].config.grad_sync_func is not None,
        "engine": sorted({stored.dtype for stored in trainer.rollout_worker.engine.layout().values()}),
        "cache": asleep,
        "away": {
            part: sum(tensor.untyped_storage().nbytes() for tensor in trainer.actor._tensors_of(part))
            for part in ("weights", "gradients", "optimizer")
        },
        "critic": {} if trainer.critic is None else _critic(trainer.critic.model),
    }


def _critic(model: Critic) -> Facts:
    model.offload()
    parts = ("weights", "gradients", "optimizer")
    away = {part: sum(tensor.untyped_storage().nbytes() for tensor in model._tensors_of(part)) for part in parts}
    return {"updates": model.num_updates, "away": away}


@of_a_config
def files(config: Config) -> Facts:
    """A whole run from its start to its end."""
    _settle()
    root, printed = Path(config.run.output_dir), io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(config)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{name: value for name, value in line.items() if not is_wall_clock(name)} for line in lines],
        "checkpoints": sorted(path.name for path in (root / "checkpoints").glob("step-*")),
        "exports": sorted(str(path.parent.name) for path in (root / "checkpoints").glob("*/hf")),
        "samples": len((root / "samples.jsonl").read_text().splitlines()),
        "there": sorted(path.name for path in root.iterdir()),
        "canary": "weight-sync self-test" in (root / "notes.jsonl").read_text(),
        "printed": bool(printed.getvalue()),
    }


@of_a_config
def laid(config: Config) -> Facts:
    """Four ranks, and what Megatron is told of the model."""
    found = resolve(config, 4)
    grid, arch = found.grid, found.arch
    passed = config.megatron.transformer
    told = transformer_config(arch, config.parallel, config.actor, dtype=torch.float32, given=passed)
    return {
        "actor": repr(megatron_layouts(arch, grid, dtype="float32", te=False)),
        "engine": repr(memory_plan(found.config).layouts(found.config, arch, grid)),
        "ranks": [(grid.coords(rank), grid.replica(rank)) for rank in range(4)],
        "told": {name: value for name, value in vars(told).items() if isinstance(value, (int, float, str))},
    }


@of_a_config
def read(config: Config) -> Facts:
    """The first prompts of training and of evaluations."""
    found, length = resolve(config, 1), config.rollout.prompt_length
    source = load_training(config.data, found.tokenizer, prompt_length=length, seed=config.run.seed)
    prompts = source.next(6)
    held_out = load_validation(config.data, found.tokenizer, prompt_length=length)
    return {
        "train": prompts,
        "val": held_out,
        "learned": examples(prompts, found.tokenizer, config, learns_from=found.algorithm.learns_from),
    }


@of_a_config
def bounds(config: Config) -> Facts:
    """From a signal, or from the start of the process."""
    stop = Stop(config.run, ends={}, keeps_time=True, say=lambda text: None)
    return {"signals": stop._timeouts, "limits": limits(config.run, {})}
