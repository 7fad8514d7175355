"""Starts `mrl` as a user does, for the end-to-end tests: a tiny addition run, under torchrun with several ranks."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from mrl.distributed.local_ranks import fork_server_context, free_port
from tests import warm
from tests.ranks import PRELOAD, run_ranks

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 240

CONFIG = """
run: {seed: 3, num_threads: 1}
model:
  preset: qwen2_tiny
  overrides:
    {hidden_size: 32, num_hidden_layers: 2, intermediate_size: 64, num_attention_heads: 4, num_key_value_heads: 2}
  tokenizer: "char:0123456789<>+#"
  dtype: float32
data: {task: addition, task_kwargs: {min_terms: 2, max_terms: 3, max_value: 9, num_val: 16}}
train: {num_steps: 3, batch_size: 8, minibatch_size: 4, warm_start: {num_steps: 2, batch_size: 8}}
actor: {lr: 1.0e-3, max_tokens_per_microbatch: 64}
rollout: {n: 4, prompt_length: 12, response_length: 4, max_num_seqs: 16}
reward: {functions: [{name: exact_match}, {name: length, weight: 0.1, kwargs: {target: 2, limit: 4}}]}
algorithm: {name: grpo, kl_in: loss, kl_coef: 0.05, entropy_coef: 0.01, clip_low: 0.2, clip_high: 0.28}
observe: {console: plain, tensorboard: false, report: false, num_samples: 2}
"""


def arguments(folder, overrides=()):
    """The arguments of `mrl` for a run in `folder` (its config file is written there)."""
    config = Path(folder) / "config-given.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG)
    return ["train", str(config), f"run.output_dir={folder}/run", *overrides]


def command(folder, overrides=(), ranks=1):
    """The shell command of a run."""
    words = ["-m", "mrl", *arguments(folder, overrides)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, *launcher, *words]
    return [sys.executable, *words]


def start(folder, overrides=(), ranks=1):
    """The process of a run, its output in `folder`/output.txt; it leads a session of its own."""
    with open(Path(folder) / "output.txt", "ab") as output:
        return subprocess.Popen(
            command(folder, overrides, ranks),
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm.python()},  # what torchrun starts ranks by
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def train(folder, overrides=(), ranks=1):
    """Runs to the end and returns the lines of metrics.jsonl."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    status = start(folder, overrides, ranks).wait(TIMEOUT_S)
    assert status == 0, (Path(folder) / "output.txt").read_text()[-4000:]
    return metrics(folder)


def fork(folder, overrides=(), **variables):
    """The process of a run of one rank, as `start` has it, that was spared the imports."""
    process = fork_server_context(PRELOAD).Process(
        target=_alone, args=(str(folder), arguments(folder, overrides), variables)
    )
    process.start()
    return process


def _alone(folder, words, variables):
    os.environ.update(variables)
    os.setsid()
    os.chdir(REPOSITORY)
    with open(Path(folder) / "output.txt", "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["mrl", *words]
    from mrl.__main__ import main

    sys.exit(main())


def train_in_pool(folder, overrides, ranks):
    """As `train`, in the reused ranks of `tests/ranks.py`: no new processes, the same command line."""
    return in_pool(folder, arguments(folder, overrides), ranks)


def in_pool(folder, words, ranks):
    """The lines of metrics.jsonl of `mrl WORDS`, run in the reused ranks of `tests/ranks.py`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    assert run_ranks(ranks, in_rank, words, [free_port(), free_port()]) == [0] * ranks
    return metrics(folder)


def in_rank(words, ports):
    """Runs `mrl WORDS` in a rank of `tests/ranks.py` and returns its exit status."""
    from mrl.commands.cli import main

    return in_job(functools.partial(main, words), ports)


def in_job(work, ports):
    """Calls `work`, which starts a run, in a rank of `tests/ranks.py` and returns its result."""
    from mrl.distributed import launch
    from mrl.megatron import parallel_state

    parallel_state.destroy()  # what an earlier test of these ranks left
    launch.shutdown_distributed()  # mrl starts the process group itself
    os.environ["MASTER_PORT"] = str(ports[0])
    try:
        return work()
    finally:
        os.environ["MASTER_PORT"] = str(ports[1])
        launch.init_distributed("cpu", num_threads=1)


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
