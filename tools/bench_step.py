"""Benchmarks a complete training iteration against TRL's GRPOTrainer, or PPO or true on-policy mode against mrl's GRPO.

    python tools/bench_step.py                     # all cases, fp32 and bf16
    python tools/bench_step.py --quick             # a few iterations of small models
    python tools/bench_step.py --case small --dtype float32 --iterations 20
    python tools/bench_step.py --device cuda --case middle --dtype bfloat16
    python tools/bench_step.py --algorithm ppo     # with a critic of the actor's size, against mrl's GRPO
    python tools/bench_step.py --true-on-policy    # the cost of rollout.true_on_policy, against mrl without it
    python tools/bench_step.py --lora 32           # adapters of rank 32, against training all weights

An iteration of mrl is weight sync, rollout, reward, pack, update and log, as `mrl train` runs it, in one process. One
of TRL is what its `train()` does between two optimizer steps. Both start from one Hugging Face folder with random
weights, sample the same number of responses, all of full length (the end token is not sampled in TRL, ignored in mrl),
score them with the same function, and take one AdamW step (beta 0, clip 1, no recompute, the same learning rate). bf16
means weights and activations in bf16 for both; mrl then keeps fp32 master weights, TRL does not. TRL first tries
several microbatch sizes (`per_device_train_batch_size`, with gradient accumulation) and keeps the fastest: "trl_batch".
Then the two alternate. Prints one JSON line per case and dtype with the median ratio of adjacent iterations. In the
case "long_prompts" prompts are four times as long as responses; "wide" has two layers of the width of a 1.5B model,
where adapters cost little. With `--num-threads 1` times are CPU times, independent of other load (and without mrl's
reward workers, which are separate processes).

"times_floor" is the time of each over that of the matrix products of its step (`tools/bench/roofline.py`), at the rate
of a square product in this run, and "ratio_at_most" TRL's time over that of mrl's products, an upper bound for "ratio".

With `--algorithm ppo` both are runs of mrl with the same model and batch: GRPO, and PPO with a critic that starts as
the actor and takes one optimizer step when the actor does. "ratio" is then PPO's time over GRPO's. With
`--true-on-policy` both are GRPO, with and without `rollout.true_on_policy`, and "ratio" is the time with it over that
without. With `--lora` both are GRPO, and "ratio" is the time with `actor.lora`, whose adapters alone are synced, over
that of training all weights; "update_ratio" compares the updates alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.measure import add_device, commit, device_name, matrix_rate, spread, synchronize
from bench.roofline import Shape, limits, now

from mrl.config import config as mrl_config
from mrl.rewards.regex import regex
from mrl.train import reinforcement_step
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.trainer import Trainer

LEARNING_RATE = 1e-5
SEED = 0
PATTERN = "[02468]$"
"""Pattern of the reward function "regex": 1 if the last word ends in an even digit."""

Settings = dict[str, dict[str, Any]]
"""Config sections with their fields."""


@dataclass(frozen=True)
class Case(Shape):
    """Model and batch.

    Attributes:
        microbatch_tokens: `actor.max_tokens_per_microbatch` of mrl; wide activations are faster in microbatches that
            fit into the cache.
        iterations: Timed iterations of each, unless `--iterations` is given.
        warm_up: Untimed iterations.
        trials: Steps of TRL for each microbatch size, of which the last is timed.
    """

    microbatch_tokens: int = 16384
    iterations: int = 9
    warm_up: int = 2
    trials: int = 2


LARGE = {"iterations": 3, "warm_up": 1, "trials": 1}
"""Settings for cases whose steps take many seconds."""
CASES = {
    "small": Case(4, 128, 4, 64, prompts=16, samples=16, prompt_len=8, response_len=8),
    "middle": Case(
        8, 512, 8, 32000, prompts=8, samples=8, prompt_len=64, response_len=64, microbatch_tokens=1160, **LARGE
    ),
    "long_prompts": Case(
        4, 128, 4, 2000, prompts=8, samples=8, prompt_len=128, response_len=32, microbatch_tokens=1600
    ),
    "wide": Case(
        2, 2048, 16, 8000, prompts=4, samples=8, prompt_len=64, response_len=64, microbatch_tokens=1160, **LARGE
    ),
}
QUICK = {
    "small": Case(2, 64, 4, 64, prompts=4, samples=4, prompt_len=8, response_len=8),
    "middle": Case(2, 128, 4, 2000, prompts=4, samples=4, prompt_len=32, response_len=32),
    "long_prompts": Case(2, 128, 4, 2000, prompts=4, samples=4, prompt_len=64, response_len=16),
    "wide": Case(1, 512, 8, 2000, prompts=4, samples=4, prompt_len=32, response_len=32),
}
TRL_PARTS = (1, 2, 4)
"""Numbers of microbatches that TRL tries."""


def main() -> None:
    """Parses the command line and prints a JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--iterations", type=int, help="timed iterations of each; default: 9, for large cases 3")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="smaller models and batches")
    parser.add_argument(
        "--algorithm", choices=["grpo", "ppo"], default="grpo", help="grpo: against TRL; ppo: against mrl's GRPO"
    )
    parser.add_argument("--true-on-policy", action="store_true", help="with rollout.true_on_policy against without")
    parser.add_argument("--lora", type=int, metavar="RANK", help="actor.lora.rank, against training all weights")
    add_device(parser)
    args = parser.parse_args()
    if args.lora is not None and (args.true_on_policy or args.algorithm == "ppo" or args.lora < 1):
        parser.error("--lora takes a rank above 0, and is measured with GRPO and without --true-on-policy")
    if args.true_on_policy and args.algorithm == "ppo":
        parser.error("--true-on-policy is measured with GRPO: leave --algorithm out")
    bench = "step_ppo" if args.algorithm == "ppo" else "step_true_on_policy" if args.true_on_policy else "step"
    run = {"step": run_case, "step_ppo": run_ppo_case, "step_true_on_policy": run_true_on_policy_case}[bench]
    if args.lora is not None:
        bench, run = "step_lora", partial(run_lora_case, rank=args.lora)
    transformers.logging.set_verbosity_error()
    for name in args.case:
        case = (QUICK if args.quick else CASES)[name]
        for dtype in args.dtype:
            iterations = args.iterations or (3 if args.quick else case.iterations)
            with tempfile.TemporaryDirectory() as folder:
                found = run(case, dtype, Path(folder), args.device, iterations=iterations, num_threads=args.num_threads)
            print(json.dumps({"bench": bench, "case": name, "quick": args.quick, **found}), flush=True)


def run_case(case: Case, dtype: str, folder: Path, device: str, *, iterations: int, num_threads: int) -> dict[str, Any]:
    """Compares mrl with TRL."""
    rows = write_inputs(case, folder)
    times: dict[str, list[float]] = {"mrl": [], "trl": []}
    phases: list[dict[str, float]] = []
    config = job_config(case, dtype, folder, device, num_threads, steps=case.warm_up + iterations)
    with open_trainer(build_run_plan(config)) as trainer:
        trainer.resume()

        def after_step(step: int, seconds: float) -> None:
            """Runs a step of mrl after each step of TRL."""
            began = now()
            timings = mrl_step(trainer, case, step)
            synchronize(trainer.device)
            if step > case.warm_up:
                times["mrl"].append(now() - began)
                times["trl"].append(seconds)
                phases.append(timings)

        rate = matrix_rate(getattr(torch, dtype), trainer.device, now)
        batch = best_trl_batch(case, dtype, folder, device, rows)
        run_trl(case, dtype, folder, device, rows, case.warm_up + iterations, after_step, batch)
        rate = max(rate, matrix_rate(getattr(torch, dtype), trainer.device, now))
    ratios = [theirs / ours for theirs, ours in zip(times["trl"], times["mrl"], strict=True)]
    return {
        **described(case, dtype),
        **ratio_range(ratios),
        "mrl_s": spread(times["mrl"]),
        "trl_s": spread(times["trl"]),
        "trl_batch": batch,
        **limits(case, {name: statistics.median(taken) for name, taken in times.items()}, rate),
        "mrl_phases_s": medians(phases),
        **where(iterations, device, num_threads, ("torch", "trl", "transformers", "megatron-core")),
    }


def run_ppo_case(
    case: Case, dtype: str, folder: Path, device: str, *, iterations: int, num_threads: int
) -> dict[str, Any]:
    """Compares PPO with GRPO."""
    critic = {"lr": LEARNING_RATE, "adam_beta2": 0.999, "clip_grad": 1.0}
    runs: dict[str, Settings] = {"grpo": {}, "ppo": {"algorithm": {"name": "ppo"}, "critic": critic}}
    return run_two(runs, case, dtype, folder, device, iterations=iterations, num_threads=num_threads)


def run_true_on_policy_case(
    case: Case, dtype: str, folder: Path, device: str, *, iterations: int, num_threads: int
) -> dict[str, Any]:
    """Compares GRPO with `rollout.true_on_policy` with GRPO without it."""
    runs: dict[str, Settings] = {"off": {}, "on": {"rollout": {"true_on_policy": True}}}
    return run_two(runs, case, dtype, folder, device, iterations=iterations, num_threads=num_threads)


def run_lora_case(
    case: Case, dtype: str, folder: Path, device: str, *, iterations: int, num_threads: int, rank: int
) -> dict[str, Any]:
    """Compares GRPO with low-rank adapters with GRPO of all weights."""
    adapters = {"rank": rank, "alpha": 2.0 * rank, "merge": False}
    runs: dict[str, Settings] = {"full": {}, "lora": {"actor": {"lora": adapters}}}
    found = run_two(runs, case, dtype, folder, device, iterations=iterations, num_threads=num_threads)
    updates = [found[f"{name}_phases_s"]["update_actor"] for name in ("lora", "full")]
    return {"rank": rank, **found, "update_ratio": round(updates[0] / updates[1], 2)}


def run_two(
    runs: dict[str, Settings],
    case: Case,
    dtype: str,
    folder: Path,
    device: str,
    *,
    iterations: int,
    num_threads: int,
) -> dict[str, Any]:
    """Compares the second run with the first; they alternate step by step in separate processes, in alternating order.

    Args:
        runs: Name -> settings in addition to `job_config`.
        case: Model and batch.
        dtype: Dtype of the model.
        folder: Folder for inputs and runs.
        device: Device of both runs.
        iterations: Timed steps of each.
        num_threads: CPU threads per run.
    """
    write_inputs(case, folder)
    first, second = runs
    times: dict[str, list[float]] = {name: [] for name in runs}
    phases: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    processes = multiprocessing.get_context("spawn")
    pipes = {}
    for name, more in runs.items():
        place = folder / name
        place.mkdir()
        steps = case.warm_up + iterations
        config = job_config(case, dtype, folder, device, num_threads, steps=steps, more=more, place=place)
        pipes[name], child_end = processes.Pipe()
        processes.Process(target=serve_steps, args=(config, case, child_end), daemon=True).start()
        child_end.close()
    for step in range(1, case.warm_up + iterations + 1):
        for name in (second, first) if step % 2 == 0 else (first, second):
            pipes[name].send(step)
            seconds, timings = pipes[name].recv()  # EOFError if the run failed, which printed its error
            if step > case.warm_up:
                times[name].append(seconds)
                phases[name].append(timings)
    ratios = [second_s / first_s for second_s, first_s in zip(times[second], times[first], strict=True)]
    return {
        **described(case, dtype),
        **ratio_range(ratios),
        **{f"{name}_s": spread(seconds) for name, seconds in times.items()},
        **{f"{name}_phases_s": medians(of_run) for name, of_run in phases.items()},
        **where(iterations, device, num_threads, ("torch", "megatron-core")),
    }


def serve_steps(config: mrl_config.Config, case: Case, pipe: Connection) -> None:
    """Runs a job in a subprocess: takes a step per message and answers with its time and that of its phases, s."""
    with open_trainer(build_run_plan(config)) as trainer:
        trainer.resume()
        trainer.init_reference_and_critic(0)
        for _ in range(config.train.num_steps or 0):
            step = pipe.recv()
            began = time.perf_counter()
            timings = mrl_step(trainer, case, step)
            synchronize(trainer.device)
            pipe.send((time.perf_counter() - began, timings))


def described(case: Case, dtype: str) -> dict[str, Any]:
    """Returns model and batch as text."""
    return {
        "model": f"{case.num_layers} layers, hidden {case.hidden}, vocabulary {case.vocabulary}",
        "dtype": dtype,
        "batch": f"{case.prompts} x {case.samples} samples",
        "prompt_len": case.prompt_len,
        "response_len": case.response_len,
        "microbatch_tokens": case.microbatch_tokens,
    }


def ratio_range(ratios: list[float]) -> dict[str, float]:
    """Returns median, minimum and maximum of the ratios of adjacent times."""
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }


def medians(phases: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median time of each phase over the iterations, s."""
    names = sorted({name for timings in phases for name in timings})
    return {name: round(statistics.median(timings.get(name, 0.0) for timings in phases), 4) for name in names}


def where(iterations: int, device: str, num_threads: int, packages: tuple[str, ...]) -> dict[str, Any]:
    """Returns the environment of the measurement."""
    return {
        "iterations": iterations,
        "device": device_name(device),
        "num_threads": num_threads,
        "versions": {name: version(name) for name in packages},
        "commit": commit(),
    }


# ---- inputs of both


def write_inputs(case: Case, folder: Path) -> list[dict[str, str]]:
    """Writes model, tokenizer and prompts; returns the prompts' rows. Token i is the word "t<i>"."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, case.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder / "tokenizer")
    config = transformers.Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.hidden * 11 // 4,
        num_hidden_layers=case.num_layers,
        num_attention_heads=case.heads,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(SEED)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(SEED)
    ids_BT = torch.randint(2, case.vocabulary, (case.prompts * 8, case.prompt_len), generator=generator)
    rows = [{"prompt": " ".join(f"t{i}" for i in ids_T), "answer": ""} for ids_T in ids_BT.tolist()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


# ---- mrl


def job_config(
    case: Case,
    dtype: str,
    folder: Path,
    device: str,
    num_threads: int,
    *,
    steps: int,
    more: Settings | None = None,
    place: Path | None = None,
) -> mrl_config.Config:
    """Returns the config of a run on the inputs in `folder`.

    Args:
        case: Model and batch.
        dtype: Dtype of the model.
        folder: Folder of the inputs.
        device: Device of the run.
        num_threads: Threads of the run.
        steps: Number of steps.
        more: Additional settings.
        place: Folder of the run; None: `folder`.
    """
    settings: dict[str, Any] = {
        "run": {
            "output_dir": str((place or folder) / "run"),
            "device": device,
            "num_threads": num_threads,
            "seed": SEED,
        },
        "train": {"num_steps": steps, "batch_size": case.prompts},
        "model": {"path": str(folder / "model"), "tokenizer": str(folder / "tokenizer"), "dtype": dtype},
        "actor": {
            "lr": LEARNING_RATE,
            "adam_beta2": 0.999,
            "clip_grad": 1.0,
            "max_tokens_per_microbatch": case.microbatch_tokens,
        },
        "rollout": {
            "n": case.samples,
            "prompt_length": case.prompt_len,
            "response_length": case.response_len,
            "ignore_eos": True,
            "max_num_seqs": case.prompts * case.samples,
        },
        "algorithm": {"name": "grpo"},
        "reward": {"functions": [{"name": "regex", "kwargs": {"pattern": PATTERN}}]},
        "data": {"train_files": [str(folder / "train.jsonl")]},
        "observe": {"console": "off", "report": False},
    }
    for section, values in (more or {}).items():
        settings[section] = {**settings.get(section, {}), **values}
    path = (place or folder) / "run.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return mrl_config.load(path)


def mrl_step(trainer: Trainer, case: Case, step: int) -> dict[str, float]:
    """Runs one iteration of `mrl.train.train`; returns the time of its phases, s."""
    with trainer.timers.step(step):
        metrics = reinforcement_step(trainer, step)
    timings = trainer.timers.metrics()
    trainer.log.step(step, metrics | trainer.rates.metrics())
    if metrics["response_length/min"] != case.response_len:
        raise RuntimeError("a response of mrl is too short")
    return {name.removeprefix("timing_s/"): seconds for name, seconds in timings.items()}


# ---- TRL


def best_trl_batch(case: Case, dtype: str, folder: Path, device: str, rows: list[dict[str, str]]) -> int:
    """Returns the microbatch size, in sequences, with which TRL's step is fastest."""
    times: dict[int, float] = {}
    total = case.prompts * case.samples
    for batch in [total // parts for parts in TRL_PARTS]:
        run_trl(case, dtype, folder, device, rows, case.trials, partial(_keep, times, batch), batch)
    return min(times, key=lambda batch: times[batch])


def _keep(times: dict[int, float], batch: int, step: int, seconds: float) -> None:
    times[batch] = seconds


def trl_config(case: Case, dtype: str, folder: Path, device: str, steps: int, batch: int) -> Any:
    """Returns a `GRPOConfig` equivalent to mrl's config, with microbatches of `batch` sequences."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=device == "cpu",
        bf16=False,  # the weights already have the dtype; autocast would be slower
        model_init_kwargs={"dtype": dtype},
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=case.prompts * case.samples // batch,
        num_generations=case.samples,
        max_completion_length=case.response_len,
        generation_kwargs={"min_new_tokens": case.response_len},
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        top_k=0,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        seed=SEED,
    )


def run_trl(
    case: Case,
    dtype: str,
    folder: Path,
    device: str,
    rows: list[dict[str, str]],
    steps: int,
    after_step: Callable[[int, float], None],
    batch: int,
) -> None:
    """Runs TRL with microbatches of `batch` sequences; calls `after_step` with each step's number and time in s."""
    from datasets import Dataset
    from trl import GRPOTrainer

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types
        """Callback that times each step, excluding `after_step`."""

        began = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            synchronize(torch.device(device))
            after_step(state.global_step, now() - self.began)
            self.began = now()

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [regex(prompt="", response=text, answer=None, extra={}, pattern=PATTERN) for text in completions]

    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=trl_config(case, dtype, folder, device, steps, batch),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    lengths = [entry["completions/min_length"] for entry in trainer.state.log_history if "reward" in entry]
    if min(lengths) != case.response_len:
        raise RuntimeError("a response of TRL is too short")


if __name__ == "__main__":
    main()
