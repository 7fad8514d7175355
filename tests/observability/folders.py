"""Run folders for the tests of this folder: a config, a started folder, and a whole small run."""

import contextlib
from dataclasses import replace

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config.config import Config, LoggerConfig
from mrl.observability.run_log import RunLog


def config(
    root, *, console="off", tensorboard=False, wandb_project=None, num_steps=4, warm_start=0, loggers=(), **sections
):
    base = Config()
    return replace(
        base,
        run=replace(base.run, output_dir=str(root)),
        train=replace(base.train, num_steps=num_steps, warm_start=replace(base.train.warm_start, num_steps=warm_start)),
        observe=replace(
            base.observe,
            console=console,
            tensorboard=tensorboard,
            wandb_project=wandb_project,
            loggers=[LoggerConfig(**entry) for entry in loggers],
        ),
        **{name: replace(getattr(base, name), **values) for name, values in sections.items()},
    )


@contextlib.contextmanager
def logging(root, *, resume_step=None, **settings):
    made = config(root, **settings)
    run = RunDir(root)
    run.start(made, resume_step=resume_step, world_size=1, facts={"device": "cpu"})
    with RunLog(made, run, resume_step) as log:
        yield run, log


def row(phase="val", **changes):
    values = {
        "phase": phase, "uid": 3, "sample_index": 0, "prompt": "1+2=", "response": "3", "answer": "3", "reward": 1.0,
        "reward_parts": {"exact_match": 1.0}, "reward_error": None, "finish_reason": "stop", "response_length": 1,
    }  # fmt: skip
    return values | changes


def metrics_of(step):
    """Deterministic and wall-clock values of a step."""
    return {
        "critic/score/mean": step / 10,
        "response_length/mean": 3.0 + 1 / (step + 2),
        "actor/entropy": 0.1 * step,
        "refit/bytes_moved": 0.0,
        "refit/gb_per_s": 1.5,
        "timing_s/gen": 0.2,
        "timing_s/update_actor": 0.1,
        "timing_s/step": 0.35,
        "perf/throughput": 1000.0,
    }


def run_steps(log, first, last):
    """Steps first .. last with an evaluation before the line of each, as the loop has it."""
    for step in range(first, last + 1):
        log.evaluation(step, {"val/accuracy": step / 8})
        log.samples(step, [row(response=f"answer of step {step}"), row("train")])
        log.step(step, metrics_of(step))
