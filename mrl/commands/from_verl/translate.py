"""Translates the settings of a verl run into a config of mrl: `mrl from-verl`.

verl's own defaults apply where nothing is set, so that the run is the one that verl would have made.
`config/verl_keys/translated_keys.py` maps the keys and has the reasons for those that are not translated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any

import yaml

from mrl.commands.from_verl.critic import SCHEDULES, critic
from mrl.commands.from_verl.distillation import distillation, without_the_task
from mrl.commands.from_verl.hydra import Settings
from mrl.commands.from_verl.lora import differs as lora_differs
from mrl.commands.from_verl.lora import lora, reference_of_adapters
from mrl.commands.from_verl.objective import objective
from mrl.commands.from_verl.off_policy import batch_size, differs, num_steps, with_recipes
from mrl.commands.from_verl.reward import differs as rewards_differ
from mrl.commands.from_verl.reward import reward
from mrl.commands.from_verl.rollout import lengths, rollout, without_refused
from mrl.commands.from_verl.rollout_correction import rollout_correction
from mrl.commands.from_verl.sft import SftRun
from mrl.commands.from_verl.translation import Translation
from mrl.commands.from_verl.verl_run import VerlRun, format_value, is_unset
from mrl.config.config import Config, RolloutConfig
from mrl.config.did_you_mean import did_you_mean, nearest
from mrl.config.keys import NEAR, nested
from mrl.config.megatron_fields.table import TABLE, is_default
from mrl.config.values import Values
from mrl.config.verl_keys import translated_keys
from mrl.config.verl_keys.renamed_keys import with_current_names
from mrl.config.verl_keys.training_effect import changes_training
from mrl.config.verl_keys.translated_keys import (
    ACTOR,
    DDP,
    DTYPES,
    FSDP,
    MAPS,
    MEDIA_COLUMNS,
    MEDIA_MODELS,
    MEGATRON,
    NO_MEDIA,
    OVERRIDE,
    PASSED,
    ROLLOUT,
    ROOT,
    is_harmless,
    not_read,
    verdict,
)
from mrl.config.verl_keys.verl_reward import SANDBOX
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.trainer.validation.parallel import build_parallel_layout

Pair = tuple[str, Any]

KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs",
      "k1+": "k1+", "kl+": "k1+", "k3+": "k3+", "low_var_kl+": "k3+"}  # fmt: skip

GPUS_OF_A_HOST = 8
FEW_UNKNOWN = 5
"""Unknown keys that a run of verl's trainer may have without any of its main section."""
UNKNOWN = "not a key of verl 0.9.1's trainer config"
KL_IN_REWARD = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantage estimators that use a KL per token in the reward."""


def translate(given: Mapping[str, Any]) -> Translation:
    """Translates the settings of a verl run.

    Args:
        given: Dotted keys and values; missing keys have verl's defaults.

    Raises:
        UserError: mrl does not have the advantage estimator, or a value has another type than expected.
    """
    settings = given if isinstance(given, Settings) else Settings(given)
    _check_keys(settings)
    if not settings.sft:
        return _translated(settings, settings, None)
    supervised = SftRun(settings)
    try:
        return _translated(settings, settings, supervised)
    except UserError as error:
        raise UserError(supervised.named(str(error))) from error


def _check_keys(settings: Settings) -> None:
    """Raises UserError where most settings are those of a trainer that only has the name of verl's."""
    if settings.sft or any(key.startswith(ROOT) for key in settings):
        return
    unknown = [key for key in settings if verdict(key).kind == "unknown"]
    if len(unknown) > FEW_UNKNOWN and 2 * len(unknown) > len(settings):
        raise UserError(
            f"{len(unknown)} of {len(settings)} settings are no keys of verl's trainer, such as {unknown[0]}, and none "
            f"begins with {ROOT[:-1]}: this is another trainer's run. Write its settings with the keys of mrl "
            "(docs/config.md)."
        )


def _translated(given: Mapping[str, Any], settings: Settings, supervised: SftRun | None) -> Translation:
    """Returns the translation of a run; `supervised` has the settings of an SFT run by the keys of the RL trainer."""
    given = with_current_names(given) if supervised is None else supervised.given
    verl = VerlRun(with_recipes(given) if supervised is None else given)
    values: dict[str, Any] = {}
    parts: tuple[Callable[[VerlRun], Iterator[Pair]], ...] = (
        (_data, _model, _actor, lora, _passed, _parallel, rollout, _algorithm, reward, _trainer)
        if supervised is None
        else (supervised.data, _model, _actor, lora, _passed, _parallel, supervised.algorithm, _trainer)
    )
    for part in parts:
        values.update(pair for pair in part(verl) if pair[1] is not None)
    values |= reference_of_adapters(values)
    if supervised is not None:
        values.pop("train.eval_interval", None)
    typed, defaults = Values(Config), Config()
    tree: dict[str, Any] = {}
    for key, value in values.items():
        try:
            typed.update(nested(key, value), "from verl's settings")
        except UserError as error:
            verl.notes[key] = f"left out: {error}"
            continue
        if _at(defaults, key) != value:
            _put(tree, key, value)
    config = typed.made("from verl's settings")
    for key, value in without_refused(config, verl.notes):
        _remove(tree, key)
        if value is not None:
            _put(tree, key, value)
    found = Translation(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    found.lost += settings.notes
    found.missing += settings.notes + settings.asides
    num_nodes, gpus = _hosts(verl, config.rollout)
    found.num_nodes, found.gpus_per_node = num_nodes, _ranks_of_a_host(config, num_nodes, gpus)
    found.mpi = engine_capabilities(config.rollout.name).needs_mpi(config.rollout)
    found.batch_job = settings.batch_job
    found.differs = [
        *_differs(verl, num_nodes * gpus, supervised=supervised is not None),
        *lora_differs(verl, tree.get("actor", {})),
        *differs(verl, tree.get("rollout", {}), config.train.mode),
        *rewards_differ(verl, tree.get("algorithm", {}), tree.get("reward", {}).get("functions", [])),
    ]
    if found.gpus_per_node != gpus:
        found.differs.append(
            f"trainer.nnodes={num_nodes} x trainer.n_gpus_per_node={gpus}: the tensor, pipeline, context and expert "
            f"parallel sizes need another number of ranks; the command below starts {found.gpus_per_node} on each host"
        )
    _sort(verl, settings.overridden, found)
    if supervised is not None:
        for lines in (found.missing, found.lost, found.moot, found.differs):
            lines[:] = map(supervised.named, lines)
    return found


def _data(verl: VerlRun) -> Iterator[Pair]:
    for side in ("train", "val"):
        files = verl[f"data.{side}_files"]
        yield f"data.{side}_files", files if isinstance(files, list) else [files] if files else []
        most = verl[f"data.{side}_max_samples"]
        yield f"data.{side}_max_samples", most if most is not None and most > 0 else None
    yield "data.prompt_key", verl["data.prompt_key"]
    source = verl["data.reward_fn_key"]
    yield "data.source_key", None if source == "data_source" else source
    yield "data.shuffle", verl["data.shuffle"]
    yield "run.seed", verl["data.seed"]
    if verl["data.filter_overlong_prompts"]:
        verl.decided["data.truncation"] = "no prompt is too long after data.filter_overlong_prompts"
        yield "data.overlong_prompts", "drop"
    else:
        cuts = {"error": "error", "left": "truncate_left"}
        yield "data.overlong_prompts", verl.one_of("data.truncation", cuts, "error")


def _model(verl: VerlRun) -> Iterator[Pair]:
    yield "model.path", verl[f"{ROOT}model.path"]
    yield "model.tokenizer", verl[f"{ROOT}model.tokenizer_path"]
    yield "reference.path", verl[f"{ROOT}ref.model.path"]
    yield "model.dtype", verl.one_of(f"{MEGATRON}dtype", DTYPES, "bfloat16")


def _actor(verl: VerlRun) -> Iterator[Pair]:
    rate = verl[f"{ACTOR}optim.lr"]
    yield "actor.lr", rate
    yield "actor.weight_decay", verl[f"{ACTOR}optim.weight_decay"]
    betas = verl[f"{ACTOR}optim.betas"]
    if isinstance(betas, list) and len(betas) == 2:
        yield from zip(("actor.adam_beta1", "actor.adam_beta2"), betas, strict=True)
    own = f"{ACTOR}optim.clip_grad"
    yield "actor.clip_grad", verl[own if verl.megatron or own in verl.given else f"{ACTOR}grad_clip"]
    style = "lr_decay_style" if verl.megatron else "lr_scheduler_type"
    schedule = verl.one_of(f"{ACTOR}optim.{style}", SCHEDULES, "constant")
    yield "actor.lr_schedule", schedule
    if schedule != "constant":
        least = verl[f"{ACTOR}optim.min_lr"] if verl.megatron else rate * (verl[f"{ACTOR}optim.min_lr_ratio"] or 0.0)
        yield "actor.min_lr", least
    yield "actor.lr_warmup_steps", _warmup(verl)
    yield "actor.lr_warmup_frac", _warmup_frac(verl)
    yield "actor.ppo_epochs", verl[f"{ACTOR}ppo_epochs"]
    yield "actor.max_tokens_per_microbatch", _microbatch(verl)
    yield "actor.use_prefix_grouper", verl.given.get(f"{ACTOR}use_prefix_grouper")
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        key = f"{MEGATRON if verl.megatron or name == 'grad_offload' else FSDP}{name}"
        yield f"actor.{name}", verl[key]
    yield "actor.use_distributed_optimizer", verl[f"{MEGATRON}use_distributed_optimizer"]
    if verl.megatron:
        yield "actor.recompute", _recompute(verl)
    else:
        yield "actor.recompute", "full" if verl[f"{ROOT}model.enable_gradient_checkpointing"] else "none"
    yield "actor.overlap_grad_reduce", verl[f"{DDP}.overlap_grad_reduce"]
    for name in ("moe_token_dispatcher_type", "moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff",
                 "moe_router_load_balancing_type", "moe_router_bias_update_rate"):  # fmt: skip
        balances = verl[f"{OVERRIDE}moe_router_load_balancing_type"] == "aux_loss"
        yield f"actor.{name}", verl[f"{OVERRIDE}{name}"] if name != "moe_aux_loss_coeff" or balances else None
    yield (
        "actor.router_replay",
        verl.one_of(f"{MEGATRON}router_replay.mode", {"R2": "recompute", "R3": "rollout", "disabled": "none"}, "none"),
    )
    yield "checkpoint.export_hf", "hf_model" in (verl[f"{ACTOR}checkpoint.save_contents"] or ())
    yield "checkpoint.async_save", verl[f"{ACTOR}checkpoint.async_save"]


def _recompute(verl: VerlRun) -> str | None:
    """Returns `actor.recompute`; None: Megatron's own fields are passed on instead."""
    granularity, modules = verl[f"{OVERRIDE}recompute_granularity"], verl.given.get(f"{OVERRIDE}recompute_modules")
    method, layers = (verl[f"{OVERRIDE}recompute_{name}"] for name in ("method", "num_layers"))
    if granularity == "full":
        return "full" if method in (None, "uniform") and layers in (None, 1) else None
    if granularity == "selective":
        return "selective" if modules in (None, ["core_attn"]) else None
    return "none"


def _passed(verl: VerlRun) -> Iterator[Pair]:
    """Yields Megatron's own fields that mrl accepts."""
    for prefix, to in PASSED.items():
        given = _precision(verl, section := to.rpartition(".")[2])
        for name, value in verl.under(prefix).items():
            key, what = f"{prefix}{name}", TABLE.get((section, name))
            if key in MAPS and not MAPS[key][0].startswith("megatron."):
                granularity = key == f"{OVERRIDE}recompute_granularity"
                if not (granularity and _recompute(verl) is None):
                    continue
            elif verdict(key).kind == "moot" or (name.startswith("recompute_") and _recompute(verl) is not None):
                continue
            if what is None:
                verl.notes[key] = "Megatron has no such field"
            elif what.kind == "derived":
                verl.decided[key] = what.why
            elif is_default(section, name, value):
                verl.decided[key] = "it is the default"
            elif what.why:
                verl.notes[key] = what.why
            else:
                given[name] = value
        yield to, given or None


def _precision(verl: VerlRun, section: str) -> dict[str, Any]:
    """Returns the fields of the precision-aware optimizer, for which verl has its own keys."""
    on = verl.megatron and verl[f"{ACTOR}optim.use_precision_aware_optimizer"]
    found = {name: verl[f"{ACTOR}optim.{name}"] for name in translated_keys.PRECISION if on}
    if section == "ddp":
        return {} if found.get("main_grads_dtype", "fp32") == "fp32" else {"grad_reduce_in_fp32": False}
    return {name: value for name, value in found.items() if value != "fp32"} if section == "optimizer" else {}


def _warmup(verl: VerlRun, section: str = ACTOR, epochs: int | None = None) -> int:
    """Returns the warm-up in optimizer steps; verl counts training steps."""
    steps, ratio = verl[f"{section}optim.lr_warmup_steps"], verl[f"{section}optim.lr_warmup_steps_ratio"]
    if not steps or steps < 0:
        steps = int((ratio or 0.0) * (num_steps(verl) or 0))
    minibatches = max(1, batch_size(verl) // max(1, verl[f"{ACTOR}ppo_mini_batch_size"]))
    return int(steps) * int(minibatches) * int(epochs or verl[f"{ACTOR}ppo_epochs"])


def _warmup_frac(verl: VerlRun, section: str = ACTOR) -> float:
    """Returns verl's warm-up ratio where the number of training steps is not set; else `_warmup` has the steps."""
    steps, ratio = verl[f"{section}optim.lr_warmup_steps"], verl[f"{section}optim.lr_warmup_steps_ratio"]
    return 0.0 if (steps and steps > 0) or num_steps(verl) else float(ratio or 0.0)


def _microbatch(verl: VerlRun) -> int:
    """Returns the tokens per microbatch, at least the longest sequence."""
    longest = sum(lengths(verl))
    sequences = verl[f"{ACTOR}ppo_micro_batch_size_per_gpu"]
    if verl[f"{ACTOR}use_dynamic_bsz"] or not sequences:
        tokens: int = verl[f"{ACTOR}ppo_max_token_len_per_gpu"]
        return int(max(tokens * verl[f"{ACTOR}ulysses_sequence_parallel_size"], longest))
    return int(sequences * longest)


def _parallel(verl: VerlRun) -> Iterator[Pair]:
    if not verl.megatron:
        yield "parallel.context_parallel_size", verl[f"{ACTOR}ulysses_sequence_parallel_size"]
        return
    sizes = [key for key, (to, _, _) in MAPS.items() if key.startswith(MEGATRON) and to.startswith("parallel.")]
    for key in sizes:
        to, value = MAPS[key][0], verl[key]
        needs_tp = to == "parallel.sequence_parallel"
        yield to, value and verl[f"{MEGATRON}tensor_model_parallel_size"] > 1 if needs_tp else value


def _algorithm(verl: VerlRun) -> Iterator[Pair]:
    yield from without_the_task(verl, _task(verl))
    yield from distillation(verl)


def _task(verl: VerlRun) -> Iterator[Pair]:
    yield from objective(verl)
    if verl["algorithm.adv_estimator"] == "gae":
        yield from critic(verl, partial(_warmup, verl))
        yield "critic.lr_warmup_frac", _warmup_frac(verl, "critic.")
    yield "algorithm.entropy_coef", verl[f"{ACTOR}entropy_coeff"]
    yield from _kl(verl)
    if verl["algorithm.filter_groups.enable"]:
        yield "algorithm.dynamic_sampling", True
        yield "algorithm.max_sampling_rounds", verl["algorithm.filter_groups.max_num_gen_batches"] or None
    yield from rollout_correction(verl)


def _kl(verl: VerlRun) -> Iterator[Pair]:
    if verl[f"{ACTOR}use_kl_loss"]:
        place, coef, kind = "loss", f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type"
        if verl["algorithm.use_kl_in_reward"]:
            verl.notes["algorithm.use_kl_in_reward"] = "ignored: the KL is already in the loss"
            verl.under("algorithm.kl_")  # part of this note
    elif verl["algorithm.use_kl_in_reward"]:
        place, coef, kind = "reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
    else:
        return
    if place == "reward" and verl["algorithm.adv_estimator"] not in KL_IN_REWARD:
        verl.notes["algorithm.use_kl_in_reward"] = (
            "the estimator has one advantage per response, and a KL in the reward needs one per token: use "
            "algorithm.name=reinforce_pp or algorithm.kl_in=loss"
        )
        verl.under("algorithm.kl_")  # part of this note
        return
    yield "algorithm.kl_in", place
    yield "algorithm.kl_coef", verl[coef]
    estimator = verl.one_of(kind, KL, "k3")
    yield "algorithm.kl_estimator", estimator.rstrip("+") if place == "reward" else estimator
    if place == "reward" and verl["algorithm.kl_ctrl.type"] == "adaptive":
        for name in ("type", "target_kl", "horizon"):
            yield f"algorithm.kl_ctrl.{name}", verl[f"algorithm.kl_ctrl.{name}"]


def _trainer(verl: VerlRun) -> Iterator[Pair]:
    yield "train.batch_size", batch_size(verl)
    minibatch = verl[f"{ACTOR}ppo_mini_batch_size"]
    yield "train.minibatch_size", None if minibatch >= batch_size(verl) else minibatch
    yield "train.num_epochs", verl["trainer.total_epochs"]
    steps = num_steps(verl)
    if steps == 0:
        verl.notes["trainer.total_training_steps"] = "0 steps train nothing: use `mrl evaluate` to score a model"
    yield "train.num_steps", steps or None
    if verl["data.val_files"]:
        yield "train.eval_interval", max(0, verl["trainer.test_freq"])
    yield "checkpoint.interval", max(0, verl["trainer.save_freq"])
    yield "checkpoint.keep_last", verl["trainer.max_actor_ckpt_to_keep"] or None
    folder = verl["trainer.default_local_dir"]
    for name in ("project_name", "experiment_name"):
        folder = folder.replace(f"${{trainer.{name}}}", str(verl[f"trainer.{name}"]))
    yield "run.output_dir", folder
    loggers = verl.given.get("trainer.logger") or []
    loggers = loggers if isinstance(loggers, list) else [loggers]
    yield "observe.wandb_project", str(verl["trainer.project_name"]) if "wandb" in loggers else None
    if other := [one for one in loggers if one not in ("console", "wandb", "tensorboard", "file")]:
        unsupported = ", ".join(map(str, other))
        verl.notes["trainer.logger"] = f"mrl has no {unsupported}; the run folder has all metrics as JSON lines"
    yield "observe.num_samples", max(0, verl["trainer.log_val_generations"]) or None
    modes = {"auto": "auto", "disable": "never", "resume_path": "must"}
    yield "run.resume", verl.one_of("trainer.resume_mode", modes, "auto")
    yield "run.device", verl.one_of("trainer.device", {"cuda": "auto", "cpu": "cpu"}, "auto")


def _differs(verl: VerlRun, num_gpus: int, *, supervised: bool) -> Iterator[str]:
    """Yields settings of the engine, memory and checkpoints that mean something else in mrl."""
    engine = verl.given.get(f"{ROLLOUT}name")
    if engine in (None, "???") and not supervised:
        yield f"{ROLLOUT}name is not given: mrl's native engine samples; rollout.name=vllm or trtllm selects another"
    if engine in ("sglang", "hf"):
        yield f"{ROLLOUT}name={engine}: mrl's native engine samples instead; rollout.name selects another"
    if verl["trainer.save_freq"] > 0 and verl["trainer.max_actor_ckpt_to_keep"] is None:
        yield "trainer.max_actor_ckpt_to_keep=null: verl keeps all checkpoints, mrl the newest 2 (checkpoint.keep_last)"
    memory = f"{ROLLOUT}gpu_memory_utilization"
    if memory in verl.given:
        yield f"{memory}={format_value(verl.given[memory])}: {MAPS[memory][2]}. `mrl plan CONFIG` shows the memory"
    if not verl.megatron and num_gpus > 1:
        yield (
            f"FSDP shards the actor's weights over all {num_gpus} GPUs; in mrl each GPU has all weights unless "
            "`parallel` shards them. `mrl plan CONFIG` shows sizes that fit"
        )


def _sort(verl: VerlRun, overridden: Set[str], found: Translation) -> None:
    """Adds every given setting that is not in the config to `missing` or `moot`, with the reason.

    Args:
        verl: Settings of the run.
        overridden: Keys that the command line sets, not a config file.
        found: Translation to extend.
    """
    found.moot += [f"{key}: {why}" for key, why in verl.decided.items()]
    for key, why in verl.notes.items():
        line = f"{key}={format_value(verl.given.get(key))}: {why}" if key in verl.given else f"{key}: {why}"
        found.add_missing(line, lost=key not in verl.lossless and changes_training(key))
    unread = verl.unread()
    for key, value in unread.items():
        loud, why = not_read(key)
        listed = key in verl.notes or key in verl.decided or any(one.startswith(f"{key}=") for one in found.differs)
        if not listed:
            (found.missing if loud else found.moot).append(f"{key}={format_value(value)}: {why}")
    for key, value in verl.given.items():
        if key in verl.notes:
            continue
        what = verdict(key)
        said = what.text or f"{UNKNOWN}.{_did_you_mean_key(key)}".removesuffix(".")
        line = f"{key}={format_value(value)}: {said}"
        if what.kind == "unknown" or (what.kind == "missing" and _is_lost(verl, overridden, key, value)):
            found.add_missing(line, lost=changes_training(key))
        elif what.kind == "missing":
            found.moot.append(line)
        elif what.kind == "moot" and not key.endswith("_target_"):
            found.moot.append(f"{key}: {what.text}")
    path = f"{ROOT}model.path"
    if MEDIA_MODELS.search(str(verl.given.get(path, "")).rstrip("/").rpartition("/")[2]):
        found.add_missing(f"{path}={format_value(verl.given[path])}: {NO_MEDIA}", lost=True)


def _did_you_mean_key(key: str) -> str:
    """Returns the end of an error message, " Did you mean 'trainer.save_freq'?"; "" if no key of verl is similar.

    A key of the same section is preferred to one with the same name in another.
    """
    section, _, name = key.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for known in (*MAPS, *translated_keys.MOOT, *translated_keys.MISSING):
        if "*" not in known:
            by_name.setdefault(known.rpartition(".")[2], []).append(known)
    siblings = [tail for tail, keys in by_name.items() if any(each.rpartition(".")[0] == section for each in keys)]
    tail = nearest(name, siblings, NEAR) or nearest(name, by_name, NEAR)
    return did_you_mean(key, by_name[tail], 0.0) if tail else ""


def _is_lost(verl: VerlRun, overridden: Set[str], key: str, value: Any) -> bool:
    """Returns whether a value of a key without a counterpart has an effect in verl.

    A config file of verl names the columns of images in every run; a command line does so in runs with images.
    """
    if key in MEDIA_COLUMNS and key in overridden and value:
        return True
    if key.endswith(SANDBOX) and "custom_reward_function.path" in verl.decided:
        return False
    if key.startswith("reward_model.model.") and verl.given.get("reward_model.enable") is not True:
        return False
    return not is_harmless(key, value)


def _count_of(verl: VerlRun, key: str, default: int) -> int:
    """Returns a number of hosts or GPUs; the default if the script takes it from the machine."""
    value = verl.given.get(key, default)
    if value in (0, None) or (isinstance(value, str) and is_unset(value)):
        verl.notes[key] = f"it depends on the machine or on a variable that is not set; {default} is used"
        return default
    if type(value) is not int or value < 1:
        raise UserError(f"{key}={format_value(value)} came, expected an integer above 0.")
    return value


def _hosts(verl: VerlRun, rollout: RolloutConfig) -> tuple[int, int]:
    """Returns the hosts of the job and the ranks per host; in verl, rollout hosts may have another number of GPUs."""
    nodes, gpus = _count_of(verl, "trainer.nnodes", 1), _count_of(verl, "trainer.n_gpus_per_node", 8)
    if not rollout.nnodes or rollout.n_gpus_per_node == gpus:
        return nodes + rollout.nnodes, gpus
    total = nodes * gpus + rollout.nnodes * rollout.n_gpus_per_node
    each = total if total <= GPUS_OF_A_HOST else math.gcd(gpus, rollout.n_gpus_per_node)
    verl.notes["trainer.n_gpus_per_node"] = (
        f"training hosts have {gpus} GPUs and rollout hosts {rollout.n_gpus_per_node}; in mrl all hosts have the same "
        f"number of ranks: {total // each} host(s) of {each}"
    )
    return total // each, each


def _ranks_of_a_host(config: Config, num_nodes: int, gpus: int) -> int:
    """Returns the fewest ranks per host, at least its GPUs, that the config's parallel layout divides."""
    grid = build_parallel_layout(config, 1)
    own = grid.rollout_ranks
    unit = grid.min_world_size - own
    for ranks in range(gpus, gpus + grid.min_world_size + 1):
        training = num_nodes * ranks - own
        if training > 0 and training % unit == 0:
            return ranks
    return gpus


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _remove(tree: dict[str, Any], key: str) -> None:
    """Removes a `section.key` from a nested config, and the section if it becomes empty."""
    section, _, name = key.partition(".")
    tree.get(section, {}).pop(name, None)
    if not tree.get(section, True):
        del tree[section]
