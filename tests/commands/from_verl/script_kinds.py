# ruff: noqa: E501
"""Scripts of ten kinds with drawn settings, each with the values, the losses and the command that it translates to.

A script is a head of its kind, drawn settings, and a way to start the trainer. A setting has the words of verl's
command line, the values of mrl that they become, and the keys that are lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

COUNT = 20

_SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout.", "M.": "actor_rollout_ref.model.",
          "G.": "actor_rollout_ref.actor.megatron.", "F.": "algorithm.filter_groups.",
          "O.": "reward_model.reward_kwargs.overlong_buffer_cfg."}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Words of verl's command line with their outcome.

    Attributes:
        words: Words, with the prefixes of `_SHORT`.
        values: Key of mrl -> value.
        lost: Keys without which the run may train something else.
        alone: A group of which one setting is drawn; "": any number.
    """

    words: str
    values: dict[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    alone: str = ""


@dataclass(frozen=True)
class Case:
    """Script with the outcome of its translation; `command` is that of `mrl`, without the config."""

    text: str
    values: dict[str, Any]
    lost: set[str]
    command: str


S = Setting
COMMON = (
    S("data.train_batch_size=64 A.ppo_mini_batch_size=16", {"train.batch_size": 64, "train.minibatch_size": 16}),
    S("data.max_prompt_length=1024 data.max_response_length=4096",
      {"rollout.prompt_length": 1024, "rollout.response_length": 4096}),
    S("A.optim.lr=2e-6", {"actor.lr": 2e-6}),
    S("R.n=6", {"rollout.n": 6}),
    S("R.temperature=0.9 R.top_p=0.95", {"rollout.temperature": 0.9, "rollout.top_p": 0.95}),
    S("A.use_kl_loss=True A.kl_loss_coef=0.01 A.kl_loss_type=low_var_kl",
      {"algorithm.kl_in": "loss", "algorithm.kl_coef": 0.01}),
    S("A.entropy_coeff=0.002", {"algorithm.entropy_coef": 0.002}),
    S("trainer.total_training_steps=50 trainer.save_freq=10", {"train.num_steps": 50, "checkpoint.interval": 10}),
    S("A.clip_ratio_low=0.2 A.clip_ratio_high=0.28", {"algorithm.clip_high": 0.28}),
    S("trainer.logger='[console,swanlab]' trainer.val_before_train=False trainer.default_hdfs_dir=null"),
    S("A.ppo_epochs=2", {"actor.ppo_epochs": 2}),
    S("data.shuffle=False data.seed=7", {"data.shuffle": False, "run.seed": 7}),
    S("M.use_remove_padding=True M.trust_remote_code=True R.enforce_eager=False R.mode=async"),
    S("custom_reward_function.path=score.py custom_reward_function.name=own",
      {"reward.functions": [{"name": "score.py:own"}]}),
    S("+trainer.unheard_of=3", {}, ("trainer.unheard_of",)),
    S("data.apply_chat_template_kwargs.enable_thinking=False", {},
      ("data.apply_chat_template_kwargs.enable_thinking",)),
)  # fmt: skip
_OVERLONG = {"algorithm.overlong.buffer_length": 512, "algorithm.overlong.penalty": 0.5}

OWN: dict[str, tuple[Setting, ...]] = {
    "plain": (
        S("algorithm.adv_estimator=rloo", {"algorithm.name": "rloo"}, alone="estimator"),
        S("algorithm.adv_estimator=reinforce_plus_plus", {"algorithm.name": "reinforce_pp"}, alone="estimator"),
        S("algorithm.adv_estimator=gae critic.optim.lr=1e-5", {"algorithm.name": "ppo", "critic.lr": 1e-5},
          alone="estimator"),
        S("A.loss_agg_mode=seq-mean-token-sum", {"algorithm.loss_aggregation": "seq_mean_token_sum"}),
    ),
    "shell": (),
    "sbatch": (),
    "dapo": (
        S("F.enable=True F.metric=acc F.max_num_gen_batches=10 data.gen_batch_size=192",
          {"algorithm.dynamic_sampling": True, "algorithm.max_sampling_rounds": 10}),
        S("O.enable=True O.len=512 O.penalty_factor=0.5 O.log=False", _OVERLONG, alone="overlong"),
        S("reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=512 "
          "reward_model.overlong_buffer.penalty_factor=0.5", _OVERLONG, alone="overlong"),
        S("custom_reward_function.overlong_buffer.enable=True custom_reward_function.overlong_buffer.len=512 "
          "custom_reward_function.overlong_buffer.penalty_factor=0.5", _OVERLONG, alone="overlong"),
        S("reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=512 "
          "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5", _OVERLONG, alone="overlong"),
        S("reward_model.reward_manager=dapo +reward_model.reward_kwargs.max_resp_len=4096", alone="manager"),
        S("reward_model.reward_manager=own", {}, ("reward_model.reward_manager",), alone="manager"),
        S("A.use_token_level_loss=False", {"algorithm.loss_aggregation": "seq_mean_token_mean"}),
        S("A.clip_ratio_c=10.0", {"algorithm.dual_clip": 10.0}),
        S("algorithm.rollout_is=True algorithm.rollout_is_threshold=2.0 R.calculate_log_probs=True",
          {"algorithm.rollout_correction.rollout_is": "token"}),
    ),
    "multi_turn": (
        S("R.multi_turn.enable=True R.multi_turn.tool_config_path=tools.yaml R.multi_turn.max_assistant_turns=5",
          {"rollout.multi_turn.enable": True, "rollout.agent.environment": "verl_tools",
           "rollout.multi_turn.max_assistant_turns": 5}, alone="turns"),
        S("R.multi_turn.enable=True R.multi_turn.tool_config_path=tools.yaml R.multi_turn.max_turns=4",
          {"rollout.multi_turn.max_assistant_turns": 4}, alone="turns"),
        S("R.multi_turn.enable=True", {"rollout.multi_turn.enable": True}, ("R.multi_turn.enable",), alone="turns"),
        S("R.multi_turn.enable=True R.multi_turn.interaction_config_path=talk.yaml", {},
          ("R.multi_turn.enable", "R.multi_turn.interaction_config_path"), alone="turns"),
        S("R.name=sglang R.agent.default_agent_loop=tool_agent", {"rollout.name": "native"}, alone="loop"),
        S("R.agent.agent_loop_config_path=loops.yaml", {}, ("R.agent.agent_loop_config_path",), alone="loop"),
        S("R.agent.default_agent_loop=own_agent", {}, ("R.agent.default_agent_loop",), alone="loop"),
    ),
    "lora": (
        S("M.lora_rank=32 M.lora_alpha=16 M.target_modules=all-linear R.load_format=safetensors R.layered_summon=True",
          {"actor.lora.rank": 32, "actor.lora.alpha": 16.0, "actor.lora.target_modules": ["all-linear"]},
          alone="lora"),
        S("A.strategy=megatron M.lora.rank=16 M.lora.alpha=64 +M.lora.type=canonical_lora "
          "M.lora.target_modules='[linear_q,linear_v,linear_fc2]' M.lora.exclude_modules='[linear_k]'",
          {"actor.lora.rank": 16, "actor.lora.alpha": 64.0, "actor.lora.exclude_modules": ["k_proj"],
           "actor.lora.target_modules": ["q_proj", "v_proj", "down_proj"]}, alone="lora"),
        S("A.strategy=megatron M.lora.rank=8 M.lora.dropout=0.1 M.lora.type=dora",
          {"actor.lora.rank": 8, "actor.lora.alpha": 32.0}, ("M.lora.dropout", "M.lora.type"), alone="lora"),
        S("M.lora_rank=8 M.lora_adapter_path=adapter", {"actor.lora.rank": 8, "actor.lora.adapter_path": "adapter"},
          alone="lora"),
        S("M.lora_adapter_path=adapter", {"actor.lora.rank": 0}, ("M.lora_adapter_path",), alone="lora"),
        S("M.lora_rank=64 M.target_modules='.*_proj' critic.model.lora_rank=64", {"actor.lora.rank": 64},
          ("M.target_modules", "critic.model.lora_rank"), alone="lora"),
        S("M.lora.rank=16", {"actor.lora.rank": 0}, ("M.lora.rank",), alone="lora"),
        S("M.lora_rank=0 M.lora_alpha=32 M.lora.type=dora", {"actor.lora.rank": 0}, alone="lora"),
    ),
    "vlm": (
        S("M.path=Qwen/Qwen2.5-VL-7B-Instruct", {}, ("M.path",), alone="model"),
        S("M.path=/models/Qwen3-Omni-30B/", {}, ("M.path",), alone="model"),
        S("M.path=OpenGVLab/InternVL3-8B", {}, ("M.path",), alone="model"),
        S("data.image_key=images", {}, ("data.image_key",), alone="image"),
        S("data.video_key=clips", {}, ("data.video_key",)),
        S("+R.limit_images=10", {}, ("R.limit_images",), alone="image"),
        S("A.freeze_vision_tower=True", {}, ("A.freeze_vision_tower",)),
        S("data.image_key=null R.limit_images=null", alone="image"),
    ),
    "megatron": (
        S("G.tensor_model_parallel_size=2 G.pipeline_model_parallel_size=2",
          {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}),
        S("G.param_offload=True G.optimizer_offload=True", {"actor.param_offload": True}),
        S("+G.override_transformer_config.recompute_granularity=full "
          "+G.override_transformer_config.recompute_method=uniform +G.override_transformer_config.recompute_num_layers=1",
          {"actor.recompute": "full"}),
        S("A.router_replay.mode=R2", {"actor.router_replay": "recompute"}),
        S("+A.optim.override_optimizer_config.optimizer_cpu_offload=True",
          {"megatron.optimizer": {"optimizer_cpu_offload": True}}),
        S("+G.override_transformer_config.no_such_field=1", {}, ("G.override_transformer_config.no_such_field",)),
        S("G.qat.enable=True", {}, ("G.qat.enable",)),
        S("A.optim.lr_decay_style=cosine A.optim.min_lr=1e-7", {"actor.lr_schedule": "cosine", "actor.min_lr": 1e-7}),
    ),
    "fsdp": (
        S("A.strategy=fsdp2 A.fsdp_config.param_offload=True A.fsdp_config.optimizer_offload=True",
          {"actor.param_offload": True, "actor.optimizer_offload": True}),
        S("A.ulysses_sequence_parallel_size=2", {"parallel.context_parallel_size": 2}),
        S("M.enable_gradient_checkpointing=False", {}),
        S("A.use_dynamic_bsz=True A.ppo_max_token_len_per_gpu=32768", {"actor.max_tokens_per_microbatch": None}),
        S("actor_rollout_ref.ref.fsdp_config.param_offload=True A.fsdp_config.fsdp_size=-1"),
        S("A.optim.weight_decay=0.1 A.grad_clip=0.5", {"actor.weight_decay": 0.1, "actor.clip_grad": 0.5}),
        S("A.optim.warmup_style=cosine", {"actor.lr_schedule": "cosine"}),
        S("+M.override_config.attn_implementation=flash_attention_2"),
        S("+M.override_config.rope_theta=1e6", {}, ("M.override_config.rope_theta",)),
    ),
    "today": (
        S("reward.custom_reward_function.path=s.py reward.num_workers=4",
          {"reward.functions": [{"name": "s.py:compute_score"}]}),
        S("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0",
          {"algorithm.rollout_correction.rollout_is": "token"}),
        S("A.policy_loss.loss_mode=gspo A.loss_agg_mode=seq-mean-token-mean", {"algorithm.policy_loss": "gspo"}, alone="loss"),
        S("A.policy_loss.loss_mode=unheard_of", {}, ("A.policy_loss.loss_mode",), alone="loss"),
        S("R.checkpoint_engine.update_weights_bucket_megabytes=512 R.quantization=fp8",
          {"rollout.checkpoint_engine.update_weights_bucket_megabytes": 512, "rollout.quantization": "fp8"}),
        S("transfer_queue.enable=True trainer.use_v1=True"),
        S("data.train_max_samples=1000", {"data.train_max_samples": 1000}),
        S("data.sampler.class_path=sampler.py data.sampler.class_name=Own", {},
          ("data.sampler.class_path", "data.sampler.class_name")),
        S("reward.reward_manager.name=remote", {}, ("reward.reward_manager.name",)),
        S("R.val_kwargs.n=4 R.val_kwargs.do_sample=True R.val_kwargs.temperature=0.7", {"rollout.val_kwargs.n": 4}),
    ),
}  # fmt: skip
"""Kind -> settings of its own."""

HEADS = (
    "#!/usr/bin/env bash\nset -xeuo pipefail\nulimit -n 65535\nSIZE=$((4 * 2))\n",
    'set -eu\nHERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\ncd "$HERE/.."\nSIZE=8\n',
    'source "$(dirname "$0")/lib_of_test.sh"\nsource /opt/conda/etc/profile.d/conda.sh\nconda activate verl\nSIZE=${FROM_LIB:?}\n',
    'cat > made.json <<\'EOF\'\n{"a": "b > c"}\nEOF\nmodule load cuda || true\nexport OMP_NUM_THREADS=1\nSIZE=8\n',
    'gpus() { local count=${1:-8}; echo "$count"; }\nSIZE=$(gpus 8)\nif [[ $SIZE -gt 4 ]]; then export BIG=1; fi\n',
    "pip install -q verl > pip.log 2>&1\nray stop --force; ray start --head\nSIZE=$(seq 1 8 | wc -l)\ntrap 'ray stop' EXIT\n",
    'for name in 2 4 8; do SIZE=$name; done\ncase "${ENGINE_OF_TEST:-vllm}" in vllm) SIZE=8 ;; *) exit 1 ;; esac\n',
)
"""First lines of scripts; each sets SIZE to 8."""

STARTS = (
    'python3 -m {program} {words} "$@" 2>&1 | tee run.log\n',
    'ARGS=({words})\npython3 -u -m {program} "${{ARGS[@]}}" > run.log 2>&1\n',
    'main() {{ python3 -m {program} \\\n    {words} "$@"; }}\nmain "$@"\n',
    "HYDRA_FULL_ERROR=1 nohup python -m {program} {words} &\nwait\n",
)
PROGRAMS = {"dapo": ("recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo", "verl.trainer.main_ppo")}
LIBRARY = "FROM_LIB=8\n"
"""Text of `lib_of_test.sh`, in the folder of the scripts."""

_SLURM = (
    ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n#SBATCH --partition=gpu\n#SBATCH --time=24:00:00\n",
     "'--launcher-args=--partition=gpu --time=24:00:00' "),
    ("#SBATCH -N 4\n#SBATCH -p long   # comment\n#SBATCH --gres=gpu:h100:8\n#SBATCH -A proj\n",
     "'--launcher-args=--partition=long --account=proj' "),
    ("#SBATCH --nodes 4\n#SBATCH --gres=gpu:8\n#SBATCH --job-name verl\n", ""),
)  # fmt: skip


def case(kind: str, number: int) -> Case:
    """Returns a script of a kind; the same number draws the same script."""
    draw = random.Random(f"{kind} {number}")
    drawn = draw.sample(COMMON, 5) + draw.sample(OWN[kind], min(len(OWN[kind]), 3))
    settings, groups = [], set()
    for one in drawn:
        if not one.alone or one.alone not in groups:
            settings.append(one)
            groups.add(one.alone)
    words = " ".join(one.words for one in settings)
    if "estimator" not in groups:
        words += " algorithm.adv_estimator=grpo"
    if "model" not in groups:
        words += " M.path=models/tiny"
    words += " data.train_files=train.parquet" + (" model_engine=megatron" if kind == "megatron" else "")
    values: dict[str, Any] = {"data.train_files": ["train.parquet"]}
    lost: set[str] = set()
    for one in settings:
        values |= one.values
        lost |= {_long(key) for key in one.lost}
    head, command, nodes = draw.choice(HEADS), "", draw.choice((1, 2))
    words += f" trainer.nnodes={nodes} trainer.n_gpus_per_node=$SIZE"
    if kind == "sbatch":
        nodes = 4
        lines, options = draw.choice(_SLURM)
        head = f"#!/bin/bash\n{lines}{head}"
        words = words.replace("nnodes=1", "nnodes=$SLURM_NNODES").replace("nnodes=2", "nnodes=$SLURM_JOB_NUM_NODES")
        command = f"mrl launch --via sbatch --nodes 4 --gpus-per-node 8 {options}"
    program = draw.choice(PROGRAMS.get(kind, ("verl.trainer.main_ppo",)))
    text = draw.choice(STARTS).format(program=program, words=_long(words))
    if kind == "sbatch" and text.startswith("python3"):
        inner = text.replace(' "$@"', "").replace("\\", "\\\\").replace('"', '\\"')
        text = draw.choice((f"srun --overlap --nodes=1 {text}", f'srun --ntasks=1 bash -c "{inner}"\n'))
    more = " --master-addr FIRST_HOST --node-rank K" if nodes > 1 else ""
    command = command or f"mrl launch --via torchrun --nodes {nodes} --gpus-per-node 8{more} "
    return Case(head + text, values, lost, command)


def _long(text: str) -> str:
    """Returns words with verl's complete keys."""
    words = []
    for word in text.split(" "):
        plus = "+" if word.startswith("+") else ""
        start = word.removeprefix("+")
        words.append(plus + _SHORT[start[:2]] + start[2:] if start[:2] in _SHORT else word)
    return " ".join(words)
