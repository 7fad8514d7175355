"""`mrl rehearse CONFIG`: a production config, end to end, reduced to this machine's CPU.

The full config goes through the checks of a real run at its real world size. Then `mrl train` runs on the reduced
config (`layout.py`, `model.py`, `settings.py`) and is resumed at another layout, and its checkpoint is converted. The
stages:

    check -> build -> refit -> rollout -> reward -> update -> checkpoint -> resume -> conversion
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from mrl.checkpoint.formats.trtllm_config import model_refusal
from mrl.checkpoint.run_dir.run_dir import RunDir, flatten
from mrl.commands.launch import launch_argv
from mrl.commands.rehearse.check import check_real_run
from mrl.commands.rehearse.conversion import to_hugging_face, to_trtllm
from mrl.commands.rehearse.engine import DEFAULT_ENGINE, engine_for
from mrl.commands.rehearse.layout import sizes, smallest_like
from mrl.commands.rehearse.model import shrunk_model
from mrl.commands.rehearse.reduced_files import with_first_rows, write_model
from mrl.commands.rehearse.report import ALL, FILE, Report, Stage
from mrl.commands.rehearse.settings import (
    NUM_VAL,
    VARIETY,
    Sizes,
    other_layout,
    shrunk_config,
    small_teacher,
    with_steps,
)
from mrl.commands.rehearse.stages import STAGES, seconds_by_stage, stage_of
from mrl.config.config import Config, load, to_yaml
from mrl.data.synthetic_tasks import make_task
from mrl.data.tokenizer import HFTokenizer
from mrl.distributed.local_ranks import TOKENIZERS, TRAINING, RankError, RankUsage, run_ranks
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.models.base import ArchSpec, critic_of
from mrl.observability.hardware import Hardware
from mrl.observability.text_format import format_count
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.run_plan import Resolved, resolve
from mrl.trainer.validation.megatron import forced, without_refused_fields
from mrl.trainer.validation.parallel import build_parallel_layout

FIRST, RESUME = "first.yaml", "resume.yaml"
"""Files in the output folder with the reduced configs of the two runs."""
CHECKS = "mrl train and mrl plan check them"
SAMPLING = "only sample"
"""Row of a report's layout: ranks that only sample."""
MAX_RANKS = 8
RANK_BYTES = 500_000_000
"""Memory of a rank without its vocabulary, bytes; 0.25 to 0.4 GB were measured."""
TOKEN_BYTES = 5_000
"""Memory of a rank per token of the vocabulary, bytes: embedding, head, their gradients and moments, and logits."""


@dataclass(frozen=True)
class Options:
    """Options of the command line, other than the config.

    Attributes:
        hardware: GPUs of the real run.
        world_size: Ranks of the real run; None: by the rule of `trainer/validation/world_size.py`.
        max_ranks: Limit of the ranks started here; None: as many as fit into memory, up to MAX_RANKS.
        output_dir: Output folder; None: `runs/rehearse-` and the config's name.
        stand_ins: Replace missing files by placeholders.
        timeout_s: Time limit of the entire rehearsal, s.
        dry_run: Check and reduce the config, but start no run.
    """

    hardware: Hardware
    world_size: int | None = None
    max_ranks: int | None = None
    output_dir: str | None = None
    stand_ins: bool = False
    timeout_s: float = 600.0
    dry_run: bool = False


def rehearse(file: str, overrides: list[str], options: Options, console: Console) -> Report:
    """Runs every stage; shows and writes the report in any case.

    Raises:
        UserError: A stage failed, and the message names the stage, the cause and what to do; or `mrl plan` refuses the
            real run.
    """
    folder = Path(options.output_dir or f"runs/rehearse-{Path(file).stem}")
    _prepare_folder(folder)
    rehearsal = _Rehearsal(file, overrides, options, folder, console)
    try:
        rehearsal.run()
    finally:
        rehearsal.report.seconds = time.monotonic() - rehearsal.began
        rehearsal.report.write(folder)
        rehearsal.report.show(console)
        console.print(f"report in {folder / FILE}", soft_wrap=True)
    if rehearsal.report.plan_refuses:
        raise UserError(
            f"the stages of the rehearsal passed, but mrl plan refuses the real run: {rehearsal.report.plan_refuses}"
        )
    return rehearsal.report


def train_on_rank(config: Config) -> None:
    """Runs `mrl train` with the reduced config; the entry point of each rank."""
    from mrl.train import train

    train(config)


class _Rehearsal:
    def __init__(self, file: str, overrides: list[str], options: Options, folder: Path, console: Console) -> None:
        self.began = time.monotonic()
        self.report = Report(file)
        self._file, self._overrides, self._options = file, overrides, options
        self._folder, self._console = folder, console
        self._run = RunDir(folder / "run")
        self._preload: tuple[str, ...] = (*TRAINING, __name__)

    def run(self) -> None:
        options, report = self._options, self.report
        with self._stage("check"):
            config = load(self._file, self._overrides)
            real = check_real_run(
                config, self._file, options.world_size, options.hardware, report, placeholders=options.stand_ins
            )
            if isinstance(real.plan.tokenizer, HFTokenizer):
                self._preload += (TOKENIZERS,)
            checks = "mrl train checks them; mrl plan refuses the run" if report.plan_refuses else CHECKS
            self._done("check", f"{real.ranks}, as {checks}")
        self._console.print("reducing the config and its models ...", highlight=False, soft_wrap=True)
        small, tokens = self._shrink(real.config, real.plan, real.prompt_length)
        changed, world_size = other_layout(
            small.config, small.arch, small.grid, tokens, learns_from=real.plan.algorithm.learns_from
        )
        (self._folder / FIRST).write_text(to_yaml(small.config), encoding="utf-8")
        (self._folder / RESUME).write_text(to_yaml(with_steps(changed, 2)), encoding="utf-8")
        if not options.dry_run:
            self._first_run(small)
            self._resume(with_steps(changed, 2), world_size)
            self._convert(small)
        report.finished = True

    def _shrink(self, config: Config, plan: Resolved, prompt_length: int) -> tuple[_ReducedRun, int]:
        """Builds the reduced run and records in the report how it differs from the real one."""
        report = self.report
        experts = plan.arch.moe is not None
        tokens = plan.tokenizer.vocab_size
        max_ranks = self._options.max_ranks or _ranks_that_fit(tokens)
        grid = smallest_like(plan.grid, max_ranks, experts=experts)
        engine = engine_for(config.rollout, grid, plan.arch)
        arch, grid = shrunk_model(plan.arch, plan.grid, grid, tokens=tokens, engine=engine)
        small = shrunk_config(config, plan, Sizes(arch, grid, prompt_length, engine), self._folder)
        report.engine = engine.name
        small = replace(small, data=_with_few_rows(small.data, self._folder / "data"))
        small, left_out = without_refused_fields(small, arch, grid)
        report.not_covered += left_out
        report.warnings += forced(config, plan.arch, plan.grid)
        real, reduced = sizes(plan.grid, experts=experts), sizes(grid, experts=experts)
        report.layout = {
            ALL: (plan.grid.world_size, grid.world_size),
            **({SAMPLING: (plan.grid.rollout_ranks, grid.rollout_ranks)} if grid.has_separate_rollout else {}),
            **{name: (real[name], reduced[name]) for name in real if real[name] > 1},
        }
        stages = ("vpp", "first_stage_layers", "last_stage_layers")
        report.model = _differences(_fields_of(plan.arch), _fields_of(arch)) | {
            name: (getattr(plan.grid, name), getattr(grid, name))
            for name in stages
            if getattr(plan.grid, name) not in (None, 1)
        }
        report.settings = _differences(flatten(asdict(config)), flatten(asdict(small)))
        report.warnings += [
            f"{name} {real[name]} is not rehearsed: {format_count(max_ranks, 'rank')} are too few for it (--max-ranks)"
            for name in real
            if real[name] > 1 and reduced[name] == 1
        ]
        if engine.why:
            replacement = f"the {engine.name} engine sampled instead, since {engine.why}"
            report.not_covered.insert(0, f"the engine {config.rollout.name}: {replacement}")
        elif engine.name != DEFAULT_ENGINE:
            report.not_covered.insert(0, f"{engine.name} on GPUs: its CPU build sampled")
        if engine_capabilities(config.rollout.name).needs_mpi(config.rollout):
            start = launch_argv(plan.grid.world_size, mpi=True)
            report.not_covered.insert(1, f"MPI: mrl started the ranks itself. Start of the real run: {start}")
        if config.actor.moe_token_dispatcher_type != small.actor.moe_token_dispatcher_type:
            report.not_covered.append("the flex dispatcher: tokens were dispatched by alltoall")
        if config.actor.lora.adapter_path is not None:
            report.not_covered.append("actor.lora.adapter_path: the adapters were new ones")
        if config.rollout.multi_turn.enable:
            report.not_covered.append("tool calls: a random model generates none that can be parsed")
        if config.observe.wandb_project is not None:
            report.not_covered.append("Weights & Biases: nothing was sent")
        if VARIETY in small.reward.functions:
            report.not_covered.append(
                f"your reward alone: {VARIETY.weight} x {VARIETY.name} was added, so that samples of a random model "
                "differ and the update has a gradient"
            )
        self._write_models(config, plan, arch)
        try:
            resolve(small, grid.world_size)
        except UserError as error:
            raise RuntimeError(f"mrl reduced the config to one that its own checks reject (a bug): {error}") from error
        return _ReducedRun(small, arch, grid), tokens

    def _write_models(self, config: Config, plan: Resolved, arch: ArchSpec) -> None:
        """Writes reduced models for all model folders that the config names."""
        like, critic = config.critic.path, plan.critic
        if critic is not None and critic.family != arch.family:
            self.report.not_covered.append(f"the critic's layers ({critic.family}): it used the actor's")
            like = config.model.path or like
        reference = None if config.actor.lora.rank else config.reference.path
        folders = [("model", config.model.path, arch), ("reference", reference, arch)]
        folders += [("critic", like if config.critic.path else None, critic_of(arch))]
        teachers = zip(config.distillation.teacher_models, plan.teachers, strict=False)
        for index, (teacher, teacher_arch) in enumerate(teachers):
            folders.append((f"teacher{index}", teacher.model_path, small_teacher(teacher_arch, plan.arch, arch)))
        if plan.reward is not None:
            scorer = replace(critic_of(small_teacher(plan.reward, plan.arch, arch)), vocab_size=plan.reward.vocab_size)
            folders.append(("reward", config.reward.model.path, scorer))
        for seed, (name, source, small) in enumerate(folders):
            if source is not None:
                write_model(self._folder / name, small, dtype=config.model.dtype, seed=seed, like=Path(source))

    def _first_run(self, small: _ReducedRun) -> None:
        observe = replace(small.config.observe, report=False)  # the resumed run writes the report
        ran = self._train("first", replace(small.config, observe=observe), small.grid.world_size, resumes=False)
        rows = _rows(self._run.timings)
        spent = seconds_by_stage(rows)
        spent["build"] = max(0.0, ran.seconds - sum(spent.values()))
        metrics = self._metrics()
        for name in STAGES:
            if name in spent:
                detail = self._detail(name, metrics, small)
                self.report.stages.append(Stage(name, "passed", spent[name], detail))
            else:
                self.report.stages.append(Stage(name, "not covered", 0.0, "the run has no such phase"))

    def _resume(self, config: Config, world_size: int) -> None:
        grid = build_parallel_layout(config, world_size)
        ran = self._train("resume", config, world_size, resumes=True)
        self._metrics()
        steps = self._run.committed_steps()
        self.report.stages.append(
            Stage("resume", "passed", ran.seconds, f"{_layout(grid)}; step 2 done, checkpoints of steps {steps}")
        )

    def _train(self, name: str, config: Config, world_size: int, *, resumes: bool) -> RankUsage:
        logs = self._folder / f"logs-{name}"
        began = time.monotonic()
        left = max(1.0, self._options.timeout_s - (began - self.began))
        layout = _layout(build_parallel_layout(config, world_size))
        self._console.print(f"{name} run: {world_size} rank(s), {layout}", highlight=False, soft_wrap=True)
        try:
            ran = run_ranks(
                train_on_rank, [config], size=world_size, logs=logs, time_limit_s=left, preload=self._preload
            )
        except RankError as error:
            stage = "resume" if resumes else stage_of(error)
            log = logs / f"rank{error.rank}.log"
            where = "" if error.is_user_error else f"\nThe rank's output is in '{log}'."
            at = f" ({error.at})" if error.at else ""
            self._fail(stage, f"{error}{at}{where}", time.monotonic() - began)
        self.report.ranks.append(world_size)
        self.report.cpu_s += ran.cpu_s
        self.report.peak_bytes = max(self.report.peak_bytes, ran.peak_bytes)
        return ran

    def _convert(self, small: _ReducedRun) -> None:
        if small.config.actor.lora.rank:
            self.report.not_covered.append(
                "conversions: a checkpoint with adapters is exported by the run itself, checkpoint.export_hf"
            )
            return
        steps = self._run.committed_steps()
        checkpoint = self._run.checkpoints / f"step-{steps[-1]:08d}"
        dtype = small.config.model.dtype
        hugging_face = self._folder / "converted" / "hugging_face"
        hugging_face.parent.mkdir()
        with self._stage("to Hugging Face"):
            self._done("to Hugging Face", to_hugging_face(checkpoint, hugging_face, small.arch, dtype))
        with self._stage("to TensorRT-LLM"):
            found = to_trtllm(hugging_face, hugging_face.with_name("tensorrt_llm"), small.arch, dtype, small.grid)
            if found is None:
                reason = model_refusal(small.arch) or ""
                self.report.stages.append(Stage("to TensorRT-LLM", "not covered", self._elapsed(), reason))
            else:
                self._done("to TensorRT-LLM", found)
                what = "TensorRT-LLM itself: its checkpoint files were written and read, not run"
                self.report.not_covered.append(what)

    def _metrics(self) -> dict[str, float]:
        """Returns the metrics of the last step; a non-finite value fails the update stage."""
        last = {key: value for key, value in _rows(self._run.metrics)[-1].items() if isinstance(value, (int, float))}
        broken = [key for key, value in last.items() if not math.isfinite(value)]
        if broken:
            self._fail("update", f"{', '.join(broken)} of step {last['step']:.0f} is not finite.", 0.0)
        if last.get("refit/bytes_moved", 0.0) != last.get("refit/bytes_lower_bound", 0.0):
            self._fail("refit", "it moved more bytes than its lower bound, refit/bytes_lower_bound.", 0.0)
        if failed := last.get("reward/failed_frac", 0.0):
            self.report.warnings.append(f"reward functions failed on {failed:.0%} of the samples (see samples.jsonl)")
        if last.get("actor/grad_norm") == 0.0:
            self.report.warnings.append("the gradient of the update was zero: its metrics show little")
        self.report.metrics = last
        return last

    def _detail(self, stage: str, metrics: dict[str, float], small: _ReducedRun) -> str:
        if stage == "build":
            return f"{format_count(small.grid.world_size, 'rank')}: {_layout(small.grid)}"
        if stage == "refit" and "refit/bytes_moved" in metrics:
            local, moved = metrics["refit/bytes_local"], metrics["refit/bytes_moved"]
            return f"{moved:.0f} bytes between ranks = lower bound; {local:.0f} inside them"
        if stage == "rollout" and "response_length/mean" in metrics:
            difference = metrics.get("training/rollout_probs_diff_max", 0.0)
            mean, turns = metrics["response_length/mean"], metrics.get("num_turns/mean")
            in_turns = "" if turns is None else f" in {turns:.1f} turns of at most {metrics['num_turns/max']:.0f}"
            length = f"{mean:.1f} tokens{in_turns} on average"
            return f"{self.report.engine}: {length}; actor and engine differ by {difference:.1g}"
        if stage == "reward" and "critic/score/mean" in metrics:
            parts = [key for key in metrics if re.fullmatch(r"reward/.+/mean", key)]
            return ", ".join(f"{key.split('/')[1]} {metrics[key]:.2g}" for key in parts)
        if stage == "update":
            return f"{len(metrics)} metrics finite, grad_norm {metrics.get('actor/grad_norm', 0.0):.2g}"
        return f"steps {self._run.committed_steps()}" if stage == "checkpoint" else ""

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Runs a stage of this process; a UserError inside is reported under the stage's name."""
        self._stage_began = time.monotonic()
        self._console.print(f"{name} ...", highlight=False, soft_wrap=True)
        try:
            yield
        except UserError as error:
            self._fail(name, str(error), self._elapsed())

    def _elapsed(self) -> float:
        return time.monotonic() - self._stage_began

    def _done(self, name: str, detail: str) -> None:
        self.report.stages.append(Stage(name, "passed", self._elapsed(), detail))

    def _fail(self, stage: str, cause: str, seconds: float) -> None:
        self.report.stages.append(Stage(stage, "failed", seconds, cause.splitlines()[0]))
        raise UserError(f"the rehearsal failed in its stage '{stage}': {cause}")


@dataclass(frozen=True)
class _ReducedRun:
    config: Config
    arch: ArchSpec
    grid: ParallelLayout


def _prepare_folder(folder: Path) -> None:
    """Creates an empty output folder; deletes an earlier rehearsal's content, but never other files."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FILE).is_file():
        raise UserError(f"'{folder}' exists and is not an earlier rehearsal's output. Choose another --output-dir.")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        Report("").write(folder)
    except OSError as error:
        raise UserError(f"--output-dir {folder} cannot be written: {error.strerror}. Choose another folder.") from error


def _ranks_that_fit(tokens: int) -> int:
    available = int(psutil.virtual_memory().available)
    return max(1, min(MAX_RANKS, available // (RANK_BYTES + TOKEN_BYTES * tokens)))


def _with_few_rows(data: Any, folder: Path) -> Any:
    """Returns the data settings with fewer rows, if the task supports it."""
    if data.task is None:
        return with_first_rows(data, folder)
    fewer = {**data.task_kwargs, "num_val": NUM_VAL}
    try:
        make_task(data.task, fewer)
    except UserError:  # a user's task may lack this argument
        return data
    return replace(data, task_kwargs=fewer)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _fields_of(arch: ArchSpec) -> dict[str, Any]:
    """Returns the fields of a model for a table; of a list, the number of its items."""
    return {
        key: f"{len(value)} numbers" if isinstance(value, tuple) else value
        for key, value in flatten(asdict(arch)).items()
    }


def _differences(real: dict[str, Any], reduced: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (real.get(key), size) for key, size in reduced.items() if real.get(key) != size}


def _layout(grid: ParallelLayout) -> str:
    named = {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "vpp": grid.vpp, "dp": grid.dp, "ep": grid.ep}
    rollout = {"tp": grid.rollout_tp, "ep": grid.rollout_ep}
    actor = " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "one rank"
    replica = " x ".join(f"{name} {size}" for name, size in rollout.items() if size > 1) or "tp 1"
    own = f" on {format_count(grid.rollout_ranks, 'rank')} of their own" if grid.has_separate_rollout else ""
    return f"actor {actor}, {grid.num_replicas} replica(s) of {replica}{own}"
