"""A run put together: config in, everything that the loop needs out.

Owns what the phases of the loop act on, and what a commit point holds. `opening.py` makes it; the loop itself is in
`train.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms import base as algorithms
from mrl.algorithms.base import Algorithm
from mrl.config import AlgorithmConfig
from mrl.data.prompts import PromptSource, load_training
from mrl.data.steps import optimizer_steps, prompts_of
from mrl.distributed import launch
from mrl.distributed.collectives import sum_over, together
from mrl.distributed.groups import ProcessGroups
from mrl.engines.base import RolloutEngine, SamplingConfig, Surroundings
from mrl.errors import UserError
from mrl.formats.hf import load_from_hf
from mrl.megatron import checkpoint as megatron_checkpoint
from mrl.megatron.optimizer import LearningRate
from mrl.megatron.policy import Policy
from mrl.models.presets import initializer_range
from mrl.observe import metrics as measure
from mrl.observe.run_log import RunLog
from mrl.observe.timers import Timers
from mrl.refit.export import export_to_hf, write_model_folder
from mrl.refit.refit import Refit, gather_layouts
from mrl.rewards.scorer import Scorer, part_names
from mrl.rollout.replicas import LengthHistory
from mrl.rollout.sampling import held_out_sampling, training_sampling
from mrl.run import canary
from mrl.run.prepare import Plan
from mrl.run.progress import Progress, Standing, not_of_a_run, resumed
from mrl.run.reference import Reference
from mrl.run_folder.checkpoint import Checkpoints, Found
from mrl.run_folder.commit import STATE, read_object
from mrl.schema.registry import find
from mrl.types import Prompt, Rollout
from mrl.weights.init import random_init
from mrl.weights.tensors import DTYPES


class Job:
    """A job that has come up: ranks, actor, engine, and everything around them. `open_job` makes it.

    Attributes:
        found: The commit that the run goes on from; None: from nothing.
        policy_version: Optimizer steps taken in this run.
    """

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        device: torch.device,
        log: RunLog,
        checkpoints: Checkpoints,
        found: Found | None,
    ) -> None:
        config, rollout = plan.config, plan.config.rollout
        self.config, self.arch, self.tokenizer, self.algorithm = config, plan.arch, plan.tokenizer, plan.algorithm
        self.source, self.validation, self.run = plan.source, plan.validation, plan.run
        self.groups, self.device, self.log = groups, device, log
        self.found = found
        self.policy = Policy(config, plan.arch, groups, device)
        self.policy.offload()  # before the engine reads how much memory is free
        self.engine: RolloutEngine = find("engines", rollout.name, "ENGINE").build(
            rollout,
            plan.arch,
            tp_group=groups.rollout_tp,
            device=device,
            dtype=DTYPES[rollout.dtype or config.model.dtype],
            decode=plan.tokenizer.decode,
            surroundings=Surroundings(
                model_folder=self._model_folder,
                timeout_s=config.run.collective_timeout_s,
                trains_on_logprobs=config.algorithm.proximal == "rollout" or config.algorithm.tis_clip > 0,
            ),
        )
        self._canary_is_due = canary.is_wanted(rollout)
        self.refit = Refit(self.policy.layout(), self.policy.named_tensors(), self.engine, rollout.checkpoint_engine)
        self.scorer: Scorer | None = None
        if groups.leads_replica:
            tokenizer = plan.tokenizer
            self.scorer = Scorer(config.reward, tokenizer.decode, tokenizer.eos_ids, tokenizer.special_ids)
        self.routing: tuple[int, int] | None = None  # (layers, experts of a token) where the engine keeps its choices
        if rollout.enable_rollout_routing_replay and plan.arch.moe is not None:
            self.routing = (plan.arch.num_layers, plan.arch.moe.top_k)
        self.reward_names = part_names(config.reward)
        self.history = LengthHistory(rollout.response_length)
        self.checkpoints = checkpoints
        self.timers = Timers(device, log.phase)
        self.progress = Progress(self.timers, self._loop_state, self._commit)
        self.engine.told_to_stop = self.progress.told_to_stop
        self.policy_version = 0
        self.reference = Reference(
            config.reference,
            plan.run.checkpoints,
            needed=plan.algorithm.needs_reference,
            load=self._load_reference,
            export=self.export,
        )
        self._seq_lens: list[int] = []
        self._num_response_tokens = 0

    def close(self) -> None:
        """Ends worker processes and frees the engine."""
        if self.scorer is not None:
            self.scorer.close()
        self.engine.close()

    def _model_folder(self) -> Path:
        """Collective over the job: config.json and tokenizer of the model, written into the run folder for a preset."""
        model = self.config.model
        if model.path is not None:
            return Path(model.path)
        folder = self.run.root / "model"
        with together():
            if self.groups.rank == 0:
                write_model_folder(folder, self.arch, self.config.rollout.dtype or model.dtype, self.tokenizer)
        return folder

    # Sampling

    @property
    def sampling(self) -> SamplingConfig:
        """The distribution of training rollouts."""
        return training_sampling(self.config, self.tokenizer.eos_ids)

    @property
    def val_sampling(self) -> SamplingConfig:
        """The distribution of held-out rollouts."""
        return held_out_sampling(self.config, self.tokenizer.eos_ids)

    @contextmanager
    def engine_awake(self) -> Iterator[None]:
        """Inside, the actor is away and the engine generates; then `rollout.free_cache_engine` frees its KV cache."""
        self.policy.offload()
        self.engine.wake()
        yield
        if self.config.rollout.free_cache_engine:
            self.engine.sleep()

    def refit_if_stale(self) -> dict[str, float]:
        """Collective over the job: the engine holds the actor's weights of now; what a refit costs.

        After an evaluation it held them already. A resumed run must log the same: bytes are told either way.
        """
        if self.engine.policy_version == self.policy_version:
            return self.refit.cost()
        cost = self._refit_now()
        if self._canary_is_due:
            self._canary_is_due = False
            moved = canary.check(self._refit_now, self._generate_awake, self.arch, self.config.rollout, self.device)
            if moved is not None:
                self.log.note(f"canary: a second refit of the same weights: {moved}")
        return cost

    def _refit_now(self) -> dict[str, float]:
        self.policy.offload(keep=["weights"])
        self.policy.bring("weights")
        return self.refit(self.policy_version)

    def _generate_awake(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        with self.engine_awake():
            return self.engine.generate(prompts, sampling)

    # Training

    def sum_over_dp(self, tensor: Tensor) -> Tensor:
        """Collective over data-parallel: elementwise sum, fp64."""
        return sum_over(tensor.double(), self.groups.dp)

    def learning_rate(self) -> LearningRate:
        """The schedule over all optimizer steps of the run."""
        actor, total = self.config.actor, optimizer_steps(self.config)
        if total is None:
            raise RuntimeError("train.num_steps is open: with_num_steps comes first")
        return LearningRate(actor.lr, actor.min_lr, actor.lr_schedule, actor.lr_warmup_steps, total)

    def warm_start_learning_rate(self) -> LearningRate:
        """The schedule of the warm start."""
        warm = self.config.train.warm_start
        return LearningRate(warm.lr, 0.0, "constant", warm.lr_warmup_steps, warm.num_steps)

    def begin_warm_start(self) -> tuple[Algorithm, PromptSource, int]:
        """The supervised algorithm, the training prompts in an order of their own, and the steps already done."""
        config, rollout = self.config, self.config.rollout
        sft = algorithms.build(AlgorithmConfig(name="sft"), rollout)
        seed = config.run.seed + 1
        source = load_training(config.data, self.tokenizer, prompt_length=rollout.prompt_length, seed=seed)
        standing = self.progress.standing
        if standing is None:
            self.policy.start_optimizer(self.warm_start_learning_rate())
            return sft, source, 0
        begun = standing.state["warm_start"]
        self.policy.follow(self.warm_start_learning_rate())
        with together(), not_of_a_run(self.checkpoints.path(0)):
            source.load_state_dict(begun["source"])
        self.log.warm_start_resumed(begun["step"])
        return sft, source, int(begun["step"])

    def load_initial_weights(self) -> None:
        """Fills the actor from the model folder, or at random."""
        model = self.config.model
        layout, tensors = self.policy.layout(), self.policy.named_tensors()
        with together():
            if model.path is not None:
                load_from_hf(model.path, self.arch, layout, tensors)
            else:
                std = initializer_range(model.overrides)
                random_init(self.arch, layout, tensors, self.config.run.seed, std)
        self.policy.weights_changed()

    def _load_reference(self, path: str) -> None:
        with together():
            load_from_hf(path, self.arch, self.policy.layout(), self.policy.reference_tensors())

    def trained_tokens(self, prompt_lens_N: Tensor, response_lens_N: Tensor) -> None:
        """Notes the sequences of a step, over all ranks, for `rates`."""
        self._seq_lens = (prompt_lens_N + response_lens_N).long().tolist()
        self._num_response_tokens = int(response_lens_N.sum())

    def rates(self) -> dict[str, float]:
        """Times, tokens per second and memory of the step that just ran."""
        timings, size = self.timers.metrics(), self.groups.grid.world_size
        rates = measure.throughput_metrics(
            timings,
            num_tokens=sum(self._seq_lens),
            num_response_tokens=self._num_response_tokens,
            world_size=size,
        )
        known = self.device.type == "cuda" and self.config.model.dtype == "bfloat16"
        rates |= measure.mfu_metrics(
            self.arch,
            self._seq_lens,
            update_s=timings.get("timing_s/update_actor", 0.0),
            num_passes=self.config.actor.ppo_epochs,
            world_size=size,
            device_name=launch.device_name(self.device) if known else "",
        )
        engine = {f"perf/rollout/{name}": value for name, value in self.engine.stats().items()}
        return timings | rates | engine | self.timers.ledger.metrics()

    # Commit points

    def is_last(self, step: int) -> bool:
        """Whether the run ends after so many steps: it has its number, or less than a batch of its epochs is left."""
        train = self.config.train
        if self.progress.unlogged(step + 1) is not None:
            return False  # that step is done and has no line in the log yet
        if train.num_epochs is not None:
            left = prompts_of(train.num_epochs, self.source.num_rows) - self.source.position
            if left < train.batch_size:
                return True
        return train.num_steps is not None and step >= train.num_steps

    def commit(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collective over the job: everything that `resume` needs to go on after `step` as if nothing had happened.

        Args:
            step: Steps done.
            metrics: Of that step; `checkpoint.best_metric` is looked up in it.
        """
        self._commit(self.progress.reached(step, metrics))
        self.log.step(step, self.timers.metrics())

    def _loop_state(self) -> dict[str, Any]:
        return {
            "policy_version": self.policy_version,
            "source": self.source.state_dict(),
            "history": self.history.state_dict(),
            "reference": self.reference.record,
        }

    def _commit(self, standing: Standing) -> None:
        def write(folder: Path) -> None:
            megatron_checkpoint.save(folder / "actor", self.policy)
            if self.config.checkpoint.export_hf:
                self.export(folder / "hf")

        metric = standing.metrics.get(self.config.checkpoint.best_metric)
        began = time.monotonic()
        self.log.sync()
        with self.timers.phase("save_checkpoint"):
            path = self.checkpoints.save(standing.state["step"], write, standing.state, metric)
            if self.groups.rank == 0:
                self._drop_unused_references()
        standing.committed = True
        self.progress.took(commit_s=time.monotonic() - began)
        self.log.note(f"checkpoint {path}")

    def _drop_unused_references(self) -> None:
        """Deletes the references that no commit needs any more."""
        try:
            used = {read_object(self.checkpoints.path(step), STATE)["reference"] for step in self.checkpoints.steps()}
        except (UserError, KeyError):
            return  # a commit that was changed since: what it needs is not known
        self.reference.drop_unused(used, self.checkpoints.discard)

    def resume(self) -> int | None:
        """Collective over the job: takes up the run's last commit, else the initial weights.

        Returns:
            Steps done, with their lines in the log; None: step 0 is still to be committed.
        """
        self.policy.start_optimizer(self.learning_rate())
        if self.found is None:
            self.load_initial_weights()
            return None
        path = self.checkpoints.path(self.found.step)
        began = time.monotonic()
        self.progress.standing = resumed(self.found.state, path)
        state = self.progress.standing.state
        self.load(path, state)
        loaded_s = self.found.compared_s + time.monotonic() - began
        self.progress.took(commit_s=loaded_s)  # the best guess before the first commit
        if state["warm_start"] is not None:
            self.log.note(f"resumed from {path}, in the warm start")
            return None
        with together(), not_of_a_run(path):
            self.source.load_state_dict(state["source"])
            self.history.load_state_dict(state["history"])
            reference = state["reference"]
            if not isinstance(reference, str | None):
                raise TypeError(f"the reference is {reference!r}")
        self.log.note(f"resumed from {path}")
        changed = self.reference.resume(state["step"], reference)
        if changed:
            self.log.note(changed)
        return int(state["step"]) - (state["unlogged"] is not None)

    def load_for_evaluation(self, which: str | None) -> str:
        """Collective over the job: the weights of a checkpoint; returns what was loaded, in words.

        Args:
            which: A step of this run, a checkpoint folder, or None: the run's newest, else the initial weights.

        Raises:
            UserError: There is no such checkpoint.
        """
        if which is None:
            found = self.checkpoints.newest(mends=False)
            if found is None:
                self.load_initial_weights()
                return "the initial model"
            path, state = self.checkpoints.path(found.step), found.state
        else:
            is_step = which.isascii() and which.isdigit()
            path = self.checkpoints.path(int(which)) if is_step else Path(which)
            if is_step and not path.is_dir():
                raise UserError(
                    f"there is no checkpoint of step {which} in '{self.checkpoints.folder}'; it has "
                    f"{', '.join(map(str, self.checkpoints.steps())) or 'none'}."
                )
            state = self.checkpoints.read(path)
        self.load(path, resumed(state, path).state)
        return str(path)

    def load(self, path: Path, state: Mapping[str, Any]) -> None:
        """Collective over the job: actor and optimizer of a commit, whose state and hashes were read."""
        with together():
            megatron_checkpoint.load(path / "actor", self.policy)
        self.policy_version = int(state["policy_version"])

    def export(self, folder: Path) -> None:
        """Collective over the job: the actor as a Hugging Face folder."""
        layouts = gather_layouts(self.policy.layout())
        tensors, dtype = self.policy.named_tensors(), self.config.model.dtype
        export_to_hf(folder, self.arch, layouts, tensors, dtype=dtype, like=self.config.model.path)
        with together():
            if self.groups.rank == 0:
                self.tokenizer.save(folder)
