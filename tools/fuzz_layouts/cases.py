"""Test cases drawn from a seed: a config that determines the result, and a parallel layout that must not change it.

Most cases are runs that mrl accepts; refused configs are valid cases too. `data.py` draws the data of a case, and
`runner.py` runs it.

Weights and moments are fp32, and `actor.adam_eps` keeps gradients that are pure rounding from moving weights. A
remaining difference between two layouts is a bug.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from fuzz_layouts.data import Rows, draw_data

Settings = dict[str, Any]
"""Config values by dotted key."""

HEADS, LAYERS, EXPERTS = 4, 4, 4
DENSE = ("qwen2_tiny", "qwen3_tiny", "llama_tiny")
MIXTURES = ("qwen3_moe_tiny", "qwen2_moe_tiny", "mixtral_tiny")
RANKS = (1, 2, 2, 2, 2, 3, 4, 4)
ALGORITHMS = ("grpo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "sft", "sft")
QUIET: Settings = {
    "run.num_threads": 1,
    "model.dtype": "float32",
    "actor.adam_eps": 1e-5,
    "reward.num_workers": 1,
    "observe.console": "plain",
    "observe.tensorboard": False,
    "observe.report": False,
}


@dataclass(frozen=True)
class Start:
    """One start of `mrl train`.

    Attributes:
        ranks: Number of ranks.
        settings: Config values that are added to those of the case.
    """

    ranks: int
    settings: Settings


@dataclass(frozen=True)
class Case:
    """One test case.

    Attributes:
        seed: Seed that reproduces the case.
        settings: Config values that determine the result.
        starts: Layout of each start of the run; the second start resumes the first.
        changes: Config values of each start that override `settings` in any layout.
        rows: Contents of data files by name.
        folders: Settings of model and tokenizer folders by name.
    """

    seed: int
    settings: Settings
    starts: list[Start]
    changes: list[Settings]
    rows: dict[str, Rows]
    folders: dict[str, Settings] = field(default_factory=dict)


def draw(seed: int) -> Case:
    """Returns the case of a seed; paths in its settings start with "./", the case's own folder."""
    rng = Random(seed)
    mixture = rng.random() < 0.3
    data = draw_data(rng)
    model, folders = _model(rng, mixture, data.characters, needs_folder=data.is_chat)
    settings: Settings = {**QUIET, "run.seed": rng.randrange(1000), **model, **data.settings}
    settings |= _algorithm(rng)
    settings |= _rollout(rng, settings)
    settings |= _train(rng, settings, held_out=data.held_out)
    settings |= _optimizer(rng) | _reward(rng)
    if mixture:
        settings |= _experts(rng, settings)
    length = settings["rollout.prompt_length"] + settings["rollout.response_length"]
    changes: list[Settings] = [{}]
    if settings["train.num_steps"] and rng.random() < 0.3:
        first = {"train.num_steps": rng.randrange(1, settings["train.num_steps"])}
        changes = [first, _changed(rng, settings)]
    starts = [_layout(rng, settings, length, mixture) for _ in changes]
    return Case(seed, settings, starts, changes, data.rows, folders)


def _model(rng: Random, mixture: bool, characters: str, *, needs_folder: bool) -> tuple[Settings, dict[str, Settings]]:
    """Draws a preset, or a folder with random weights."""
    preset = rng.choice(MIXTURES if mixture else DENSE)
    overrides: Settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": rng.choice((2, 2, 4)),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if mixture:
        overrides["moe_intermediate_size" if preset != "mixtral_tiny" else "intermediate_size"] = 32
    tokenizer = f"char:{characters}"
    model = {"model.preset": preset, "model.overrides": overrides, "model.tokenizer": tokenizer}
    if not needs_folder and rng.random() < 0.8:
        return model, {}
    return {"model.path": "./model"}, {"model": model}


def _algorithm(rng: Random) -> Settings:
    name = rng.choice(ALGORITHMS)
    found: Settings = {"algorithm.name": name}
    aggregations = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
    if rng.random() < 0.4:
        found["algorithm.loss_aggregation"] = rng.choice(aggregations)
    if name == "sft":
        return found
    kl_in = rng.choice(("none", "none", "loss", "reward" if name.startswith("reinforce") else "loss"))
    if kl_in != "none":
        found |= {"algorithm.kl_in": kl_in, "algorithm.kl_coef": 0.05}
        found["algorithm.kl_estimator"] = rng.choice(("k1", "k2", "k3"))
        found["reference.update_interval"] = rng.choice((0, 0, 1))
    if rng.random() < 0.3:
        found["algorithm.rollout_correction.preset"] = rng.choice(("disabled", "decoupled_token_is", "decoupled_k3_rs"))
    if rng.random() < 0.4:
        found["algorithm.entropy_coef"] = 0.01
    if rng.random() < 0.2:
        found["algorithm.dual_clip"] = 3.0
    if rng.random() < 0.2:
        found["algorithm.overlong.mask_truncated"] = True
    if rng.random() < 0.2:
        found |= {"algorithm.overlong.buffer_length": 2, "algorithm.overlong.penalty": 0.5}
    if name == "dapo":
        found["algorithm.max_sampling_rounds"] = rng.choice((1, 3))
    elif name != "reinforce_pp":
        found["algorithm.dynamic_sampling"] = rng.random() < 0.2
    if name != "reinforce_pp" and rng.random() < 0.25:
        found["algorithm.singleton_group"] = rng.choice(("zero", "reward"))
    return found


def _rollout(rng: Random, settings: Settings) -> Settings:
    greedy = rng.random() < 0.1
    alone = settings["algorithm.name"] in ("reinforce_pp", "sft") or "algorithm.singleton_group" in settings
    alone &= settings["algorithm.name"] != "dapo" and not settings.get("algorithm.dynamic_sampling", False)
    greedy &= alone
    samples = settings["algorithm.name"] != "sft"
    found: Settings = {
        "rollout.n": 1 if greedy else rng.choice((1, 2, 4) if alone else (2, 3, 4)),
        "rollout.response_length": rng.choice((3, 4, 6)),
        "rollout.do_sample": not greedy,
    }
    for key, values, odds in (
        ("rollout.temperature", (0.7, 1.5), 0.4 * samples),
        ("rollout.top_k", (3, 8), 0.25 * samples),
        ("rollout.top_p", (0.6, 0.95), 0.25 * samples),
        ("rollout.min_p", (0.05, 0.2), 0.2 * samples),
        ("rollout.ignore_eos", (True,), 0.15),
        ("rollout.stop", (["1"], ["22", "-"]), 0.15),
    ):
        if rng.random() < odds and not (key == "rollout.stop" and "rollout.ignore_eos" in found):
            found[key] = rng.choice(values)
    if rng.random() < 0.4:
        found |= {"rollout.val_kwargs.do_sample": True, "rollout.val_kwargs.n": rng.choice((1, 2))}
        found["rollout.val_kwargs.temperature"] = rng.choice((0.5, 1.0))
        found["rollout.val_kwargs.top_k"] = rng.choice((-1, 4))
    return found


def _train(rng: Random, settings: Settings, *, held_out: bool) -> Settings:
    supervised = settings["algorithm.name"] == "sft"
    batch = rng.choice((4, 6, 8))
    found: Settings = {"train.num_steps": rng.choice((2, 2, 3)), "train.batch_size": batch}
    if not supervised:
        found["train.minibatch_size"] = rng.choice((None, batch // 2, batch))
        found["actor.ppo_epochs"] = rng.choice((1, 1, 2))
    if rng.random() < 0.35:
        found |= {"train.warm_start.num_steps": rng.choice((1, 3)), "train.warm_start.batch_size": rng.choice((4, 9))}
    if held_out and rng.random() < 0.5:
        found["train.eval_interval"] = rng.choice((1, 2))
        found["checkpoint.keep_best"] = rng.choice((0, 1))
    if rng.random() < 0.1 and "data.task" not in settings:
        found |= {"train.num_steps": None, "train.num_epochs": 1}
    found["checkpoint.interval"] = rng.choice((0, 0, 0, 1))
    found["checkpoint.export_hf"] = rng.random() < 0.15
    return found


def _optimizer(rng: Random) -> Settings:
    return {
        "actor.lr": rng.choice((1e-3, 3e-3)),
        "actor.lr_schedule": rng.choice(("constant", "linear", "cosine")),
        "actor.lr_warmup_steps": rng.choice((0, 0, 0, 0, 1)),
        "actor.weight_decay": rng.choice((0.0, 0.1)),
        "actor.adam_beta1": rng.choice((0.9, 0.5)),
        "actor.clip_grad": rng.choice((0.0, 0.1, 1.0)),
    }


def _reward(rng: Random) -> Settings:
    """Draws rewards that differ between random responses, so that there is a gradient."""
    spread = {"name": "length", "weight": rng.choice((0.1, 1.0)), "kwargs": {"target": 2, "limit": 4}}
    first = {"name": rng.choice(("exact_match", "numeric"))}
    return {"reward.functions": [first, spread]}


def _experts(rng: Random, settings: Settings) -> Settings:
    found: Settings = {"actor.moe_router_dtype": rng.choice(("fp32", "fp64"))}
    if rng.random() < 0.3:
        found["actor.moe_z_loss_coeff"] = 0.001
    if settings["algorithm.name"] != "sft" and rng.random() < 0.3:
        found |= {"actor.router_replay": "rollout", "rollout.enable_rollout_routing_replay": True}
    elif "algorithm.rollout_correction.preset" in settings and rng.random() < 0.5:
        found["actor.router_replay"] = "recompute"
    return found


def _changed(rng: Random, settings: Settings) -> Settings:
    """Draws settings that a resume changes."""
    found: Settings = {}
    if rng.random() < 0.3:
        found["actor.lr"] = 5e-4
    if settings["algorithm.name"] != "sft" and "algorithm.kl_in" not in settings and rng.random() < 0.5:
        found |= {"algorithm.kl_in": "loss", "algorithm.kl_coef": 0.1}
    return found


def _layout(rng: Random, settings: Settings, length: int, mixture: bool) -> Start:
    """Draws ranks, parallel sizes, and all other settings that must not change the result."""
    ranks = rng.choice(RANKS)
    sizes = [(tp, pp, cp) for tp in (1, 2, 4) for pp in (1, 2) for cp in (1, 2, 4) if ranks % (tp * pp * cp) == 0]
    tp, pp, cp = rng.choice(sizes)
    found: Settings = {
        "parallel.tensor_model_parallel_size": tp,
        "parallel.pipeline_model_parallel_size": pp,
        "parallel.context_parallel_size": cp,
        "parallel.sequence_parallel": tp > 1 and (mixture or rng.random() < 0.5),
        "rollout.tensor_model_parallel_size": rng.choice([size for size in (1, 2, 4) if ranks % size == 0]),
        "actor.max_tokens_per_microbatch": rng.choice((length, 2 * length, 5 * length, 16384)),
        "actor.logprob_chunk_tokens": rng.choice((5, 1024)),
        "actor.recompute": rng.choice(("none", "none", "selective", "full")),
        "actor.use_distributed_optimizer": rng.random() < 0.6,
        "actor.overlap_grad_reduce": rng.random() < 0.2,
        "rollout.max_num_seqs": rng.choice((1, 3, 256)),
        "rollout.max_num_batched_tokens": rng.choice((settings["rollout.prompt_length"], 8192)),
        "rollout.enable_prefix_caching": rng.random() < 0.7,
        "rollout.free_cache_engine": rng.random() < 0.7,
    }
    for part in ("param", "grad", "optimizer"):
        found[f"actor.{part}_offload"] = rng.random() < 0.3
    if pp == 2:
        stages = rng.choice(("even", "even", "virtual", "uneven"))
        if stages == "virtual":
            found["parallel.virtual_pipeline_model_parallel_size"] = 2
        elif stages == "uneven":
            found["parallel.num_layers_in_first_pipeline_stage"] = rng.choice((1, 3))
    if mixture:
        found |= _expert_layout(rng, ranks // pp, tp, pp, cp, found["rollout.tensor_model_parallel_size"])
    return Start(ranks, found)


def _expert_layout(rng: Random, stage: int, tp: int, pp: int, cp: int, rollout_tp: int) -> Settings:
    ep = rng.choice([size for size in (1, 2, 4) if stage % size == 0])
    found: Settings = {
        "parallel.expert_model_parallel_size": ep,
        "rollout.expert_parallel_size": rng.choice([size for size in (1, 2, 4) if rollout_tp % size == 0]),
    }
    if ep > 1:
        found["parallel.expert_tensor_parallel_size"] = rng.choice([s for s in (1, tp) if stage % (ep * s) == 0] or [1])
    if pp == cp == 1:
        found["actor.moe_token_dispatcher_type"] = rng.choice(("alltoall", "allgather"))
    return found
