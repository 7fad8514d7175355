"""Every knob of mrl: sections, fields, defaults, and how a YAML file with overrides becomes a `Config`.

Owns the schema and the only default of each field; YAML files hold differences. It imports no torch, and it knows no
range and no rule between fields: those live in `trainer/validation/`, which refuses them before any process group
exists.

A string under a field is its one line of documentation (unit and range). `None` in `algorithm` means "what the named
algorithm defines"; the resolved value is written into the run folder.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Optional

import yaml
from omegaconf._utils import get_omega_conf_dumper

from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.paths import FilePath, TokenizerPath
from mrl.config.values import Values
from mrl.config.verl_keys.verl_presets import PRESETS
from mrl.config.yaml_file import read_yaml
from mrl.errors import UserError, shown


@dataclass(frozen=True)
class RunConfig:
    """The run folder and the process."""

    output_dir: FilePath = "runs/default"
    """Run folder; everything that a run writes is in it."""
    seed: int = 0
    """Seeds initial weights, data order and sampling."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the run folder's last checkpoint if there is one; never: refuse a folder that has one;
    must: refuse to start without one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a device, else CPU with gloo."""
    num_threads: int = 0
    """CPU threads per rank; 0: cores divided by the ranks of this host."""
    collective_timeout_s: float = 600.0
    """A rank that waits longer in one collective ends the job, s, unless who it waits for samples on; the message names
    the ranks that it waits for."""
    heartbeat_timeout_s: float = 45.0
    """A rank that gives no sign of life for so long ends the job, s: its process or its host is gone, or stopped."""
    max_time_s: float = 0.0
    """Stop in order before a step that would not fit into so many seconds of this process' life; 0: no limit. SLURM's
    time limit is kept without this."""
    stop_timeout_s: float = 90.0
    """From SIGUSR1 to the end of the process, s. launch/slurm.sbatch has it sent 120 s before SLURM's time limit; where
    a checkpoint takes longer, raise both."""
    term_timeout_s: float = 25.0
    """From SIGTERM to the end of the process, s. SLURM (KillWait) and most launchers kill after 30 s; raise it where
    preemption has a longer GraceTime."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on (prompt, answer) before reinforcement learning."""

    num_steps: int = 0
    """Optimizer steps; 0: none."""
    batch_size: int = 64
    """Examples per step."""
    lr: float = 1e-3
    """Learning rate, constant after `lr_warmup_steps`."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    num_steps: Optional[int] = None
    """Reinforcement learning steps (rollout, update); null: as many as `num_epochs` gives, and 100 without that."""
    num_epochs: Optional[float] = None
    """Passes over the training rows. The run ends when less than a batch of them is left, or with `num_steps`."""
    batch_size: int = 32
    """Prompts per step; each is sampled `rollout.n` times."""
    minibatch_size: Optional[int] = None
    """Prompts per optimizer step; null: `batch_size`. Must divide it."""
    critic_warmup: int = 0
    """First steps, in which the critic is trained and the actor is not (VAPO's value pretraining; verl's key of this
    name has one step fewer)."""
    mode: Literal["sync", "async"] = "sync"
    """sync: the weights that a step trains have sampled for it. async: older ones have, while the updates of the steps
    before it ran, and runs stay as repeatable."""
    max_off_policy_steps: Optional[int] = None
    """Steps by which weights that sampled a token may be older than those it trains; 0 with async: the run of sync.
    null: 1 with async, and any number with `rollout.over_sample_rate`."""
    eval_interval: int = 0
    """Steps between evaluations on the held-out prompts; 0: only before the first and after the last step."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    path: Optional[FilePath] = None
    """Hugging Face folder: config.json, safetensors, tokenizer; or its name on the hub. null: a preset."""
    preset: Optional[str] = None
    """Name in `mrl/models/presets.py`; random initial weights."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """config.json keys that replace the preset's (hidden_size, num_hidden_layers, ...); presets only."""
    tokenizer: Optional[TokenizerPath] = None
    """Folder with a Hugging Face tokenizer, or "char:<characters>"; null: the model folder's."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations of actor and reference; the optimizer keeps fp32 master weights."""


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of the actor and the reference (Megatron's names); the data-parallel size is what the ranks leave."""

    tensor_model_parallel_size: int = 1
    """TP; ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """PP; stages."""
    virtual_pipeline_model_parallel_size: Optional[int] = None
    """Model chunks per stage (interleaved schedule); needs PP above 1."""
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP along the sequence over TP; needs TP above 1."""
    context_parallel_size: int = 1
    """CP; ranks that share the tokens of each microbatch."""
    expert_model_parallel_size: int = 1
    """EP; ranks over which a layer's experts are spread."""
    expert_tensor_parallel_size: Optional[int] = None
    """ETP; ranks that share each expert; null: TP. Differs from TP only with EP above 1."""
    num_layers_in_first_pipeline_stage: Optional[int] = None
    """Layers of the first stage; null: as many as the others."""
    num_layers_in_last_pipeline_stage: Optional[int] = None
    """Layers of the last stage; null: as many as the others."""


@dataclass(frozen=True)
class ActorConfig:
    """Optimizer and training forward/backward."""

    ppo_epochs: int = 1
    """Times that each step's samples are trained on (verl's name)."""
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, over all optimizer steps of the run."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: float = 0.0
    """Decoupled (AdamW); not on norms and biases."""
    adam_beta1: float = 0.9
    """First moment decay."""
    adam_beta2: float = 0.95
    """Second moment decay."""
    adam_eps: float = 1e-8
    """Adam epsilon."""
    clip_grad: float = 1.0
    """Global gradient norm is clipped to this; 0: not."""
    max_tokens_per_microbatch: int = 16384
    """Sequences are packed into microbatches of at most this many tokens."""
    use_prefix_grouper: bool = True
    """Compute tokens that sequences of a microbatch begin with alike once, as prompts of several samples are (verl's
    name); false: each sequence by itself, with the same losses and gradients."""
    transformer_impl: Literal["auto", "te", "local"] = "auto"
    """TransformerEngine's layers or Megatron's local ones; auto: the first where they can be, on GPUs in bfloat16. The
    log says which."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    overlap_grad_reduce: Optional[bool] = None
    """Reduce gradients while the backward runs; null: where TransformerEngine is in use."""
    param_offload: bool = False
    """Keep the actor's weights in host memory while the engine generates."""
    grad_offload: bool = False
    """Free the gradient buffers but for updates; they are not copied."""
    optimizer_offload: bool = False
    """Keep master weights and moments in host memory but for updates and checkpoints."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: core attention only, or whole layers."""
    logprob_chunk_tokens: int = 1024
    """Rows of logits that exist in fp32 at a time."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts; allgather pads all ranks' microbatches to the longest, and needs PP of 1; flex
    is DeepEP or HybridEP (`moe_flex_dispatcher_backend` in `megatron.transformer`), on GPUs."""
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = "fp32"
    """Of the router's logits and probabilities; null: `model.dtype`."""
    moe_router_load_balancing_type: Literal["none", "aux_loss"] = "none"
    """aux_loss: also minimise the unevenness of the experts' load, microbatch by microbatch."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of that loss, of which each layer has one."""
    moe_z_loss_coeff: float = 0.0
    """Weight of the mean square of each layer's log-sum-exp of the router's logits; 0: off."""
    router_replay: Literal["none", "recompute", "rollout"] = "none"
    """Updates send a token to experts chosen before, weighted by the actor's router as it is. rollout ("R3"): to those
    that the engine chose; recompute ("R2"): to those that the actor chose when it scored the samples at the rollout
    weights, which `algorithm.rollout_correction.bypass_mode=false` does, with any engine."""


@dataclass(frozen=True)
class CriticConfig:
    """The critic, where the algorithm has one (ppo, vapo); its layout, microbatches and recompute are the actor's."""

    path: Optional[FilePath] = None
    """Hugging Face folder, of any family, with the actor's vocabulary; its value head is `score.weight` where it has
    one, else 0. null: the actor's weights when the training begins, and a head of 0."""
    ppo_epochs: Optional[int] = None
    """Times that it is trained on each step's samples; null: `actor.ppo_epochs`."""
    cliprange_value: float = 0.5
    """A value's error counts as that of the value kept this near to the one before the updates, if larger; 0: not."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """As `algorithm.loss_aggregation`."""
    lr: float = 1e-5
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, over all of its optimizer steps."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: float = 0.0
    """As the actor's, like the next four."""
    adam_beta1: float = 0.9
    """First moment decay."""
    adam_beta2: float = 0.95
    """Second moment decay."""
    adam_eps: float = 1e-8
    """Adam epsilon."""
    clip_grad: float = 1.0
    """Global gradient norm is clipped to this; 0: not."""
    param_offload: bool = False
    """Keep its weights in host memory but for its own phases."""
    grad_offload: bool = False
    """Free its gradient buffers but for its updates; they are not copied."""
    optimizer_offload: bool = False
    """Keep its master weights and moments in host memory but for its updates and checkpoints."""


@dataclass(frozen=True)
class MegatronConfig:
    """Fields of Megatron's own configuration, passed on as they are; what is not named is as mrl has it."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Of `TransformerConfig`: attention_backend, recompute_modules, moe_permute_fusion, ... by Megatron's names."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Of `DistributedDataParallelConfig`: overlap_param_gather, bucket_size, ..."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Of `OptimizerConfig`."""
    unchecked: bool = False
    """Let through what mrl refuses because it changes the model or needs what mrl lacks; a warning says so. What
    follows from other keys stays refused."""


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy of the KL term; it costs nothing while `algorithm.kl_in` is "none"."""

    path: Optional[FilePath] = None
    """Hugging Face folder; null: the actor's weights when the KL starts, at first or in a resume that turns it on."""
    update_interval: int = 0
    """Steps between copies of the actor into the reference; 0: never."""


SAMPLED = ("k1", "k2", "k3", "abs")
"""Loss modes of the sampled token alone: the teacher gives its log-probability, and nothing else of it is kept."""

TOP_K = "forward_kl_topk"


@dataclass(frozen=True)
class TeacherConfig:
    """One teacher."""

    key: Optional[str] = None
    """Prompts with this in the column `distillation.teacher_key` are this teacher's; null where it is the only one."""
    model_path: Optional[FilePath] = None
    """Hugging Face folder with the student's tokenizer; or its name on the hub. null: a preset."""
    preset: Optional[str] = None
    """As `model.preset`, with the student's vocabulary: a shape with random weights, to plan and rehearse."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """As `model.overrides`."""


@dataclass(frozen=True)
class DistillationLossConfig:
    """How the student is drawn to the teacher; on the student's own samples, at `rollout.temperature`."""

    loss_mode: Literal["k1", "k2", "k3", "abs", "forward_kl_topk", "reverse_kl", "forward_kl", "jsd"] = "k3"
    """k1, k2, k3, abs: estimates at the sampled token (`algorithm.kl_estimator`); forward_kl_topk: over the teacher's
    `topk` tokens; reverse_kl, forward_kl, jsd: exact, over the whole vocabulary."""
    topk: int = 32
    """Tokens of forward_kl_topk."""
    beta: float = 0.5
    """Of jsd, (0, 1): the teacher's weight in the mixture; near 0 as forward_kl, near 1 as reverse_kl."""
    use_task_rewards: bool = True
    """Add it to the algorithm's loss; false: it is all that is minimised."""
    distillation_loss_coef: float = 1.0
    """Its factor beside the algorithm's loss."""
    loss_max_clamp: Optional[float] = None
    """A token's loss is kept between minus this and this; beyond it has no gradient. null: not."""
    log_prob_min_clamp: Optional[float] = None
    """Log-probabilities of forward_kl_topk are raised to this, nats; null: not."""
    use_policy_gradient: bool = False
    """The negative of a token's loss is its advantage in a clipped surrogate, in place of a loss with a gradient of its
    own; of k1, k2, k3 and abs."""
    clip_ratio_low: float = 0.2
    """As `algorithm.clip_low`, of that surrogate; its `dual_clip` is 3."""
    clip_ratio_high: float = 0.2
    """As `algorithm.clip_high`, of that surrogate."""

    @property
    def is_sampled(self) -> bool:
        """Whether the sampled token's log-probability is all that is asked of a teacher."""
        return self.loss_mode in SAMPLED


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation (verl's names): teachers score what the student samples."""

    enabled: bool = False
    """Whether there are teachers."""
    teacher_models: list[TeacherConfig] = field(default_factory=list)
    """The teachers; of the student's layers, or of others of its kind."""
    teacher_key: str = "data_source"
    """Column of the data row whose value names the teacher, where there are several."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)


@dataclass(frozen=True)
class ValConfig:
    """Sampling for evaluation (verl's `val_kwargs`); what it does not name is as in training: length, ends."""

    n: int = 1
    """Samples per held-out prompt."""
    do_sample: bool = False
    """False: greedy."""
    temperature: float = 1.0
    """Used when `do_sample`; 0: greedy too."""
    top_k: int = -1
    """-1: all."""
    top_p: float = 1.0
    """Nucleus mass, (0, 1]."""
    min_p: float = 0.0
    """As `rollout.min_p`, [0, 1)."""

    @property
    def greedy(self) -> bool:
        """Whether each answer is the most likely one."""
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class CheckpointEngineConfig:
    """A refit: its transport and its check."""

    update_weights_bucket_megabytes: int = 2048
    """Largest staging buffer of a refit, MiB; a larger tensor is split. A rank keeps two to send, two to receive."""
    canary: Optional[bool] = None
    """Refit twice at start and compare what fixed prompts give; null: with TensorRT-LLM's engines and
    vLLM."""


@dataclass(frozen=True)
class MultiTurnConfig:
    """Conversations with an environment in place of single answers."""

    enable: bool = False
    """true: each sample is an episode with `rollout.agent.environment`; `response_length` holds for all its tokens."""
    max_assistant_turns: Optional[int] = None
    """The policy's turns; the environment still answers the last one with its reward. null: as many as there is room
    for."""
    max_user_turns: Optional[int] = None
    """Answers of the environment that the policy is shown; null: as many as there is room for."""
    max_parallel_calls: int = 1
    """Tool calls of one turn that are made; the policy is told of those that are not."""
    max_tool_response_length: int = 256
    """Characters of a tool's answer that the policy is shown."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """What is kept of a longer one, as in verl: left: its beginning; right: its end; middle: half of either."""
    format: str = "hermes"
    """How the policy writes a tool call: hermes, llama3_json or qwen3_coder, as vLLM names them."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """Whether the chat template must append for a run to start: strict: to the letter; ignore_strippable: but for white
    space; disable: it need not. Tokens that were sampled are trained as they are either way."""


@dataclass(frozen=True)
class AgentConfig:
    """The environment of `rollout.multi_turn.enable`."""

    environment: Optional[FilePath] = None
    """Name of a file in `mrl/environments/`, or a path to a class of your own."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor."""
    num_workers: int = 8
    """Processes of each engine replica in which environments answer at the same time."""
    time_limit_s: float = 30.0
    """For one answer, s; then the sample fails and the worker is replaced."""
    memory_limit_mb: int = 2048
    """For one worker and all that it starts, MiB; 0: none."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Tokens that are drafted from what was said before and verified in one forward: the same tokens, sooner."""

    method: Optional[Literal["ngram"]] = None
    """ngram: the end of a sequence is looked for earlier in it, and in other samples of its prompt; what followed there
    is drafted. null: one token at a time."""
    num_speculative_tokens: int = 8
    """Most tokens that are drafted for a sequence at a time."""
    prompt_lookup_max: int = 5
    """Longest end of a sequence that is looked for, tokens; the longest that is found counts."""
    prompt_lookup_min: int = 2
    """Shortest."""


@dataclass(frozen=True)
class RolloutConfig:
    """The engine and the sampling distribution (verl's names)."""

    name: FilePath = "native"
    """Folder in `mrl/engines`, or 'package.module:Class', or 'path/to/file.py:Class'."""
    engine_dir: Optional[FilePath] = None
    """Folder of the engines that `trtllm_engine` runs, from tools/build_trtllm_engine.py."""
    n: int = 8
    """Samples per prompt (the group)."""
    temperature: float = 1.0
    """Above 0; applied once, by sampler and scorer alike. Evaluations have `val_kwargs`, also for the next three."""
    top_k: int = -1
    """-1: all."""
    top_p: float = 1.0
    """Nucleus mass, (0, 1]."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most likely one's probability, [0, 1)."""
    do_sample: bool = True
    """False: greedy."""
    ignore_eos: bool = False
    """Sample up to `response_length` whatever comes (benchmarks), in evaluations too."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response when they appear in it, in evaluations too; they stay part of it."""
    repetition_penalty: float = 1.0
    """Must be 1: a penalty would not be modelled in the training log-probabilities."""
    prompt_length: int = 512
    """Longest prompt, tokens."""
    response_length: int = 512
    """Longest response, tokens."""
    max_model_len: Optional[int] = None
    """Prompt and response; null: their sum."""
    dtype: Optional[Literal["float32", "bfloat16"]] = None
    """Engine weights and KV cache; null: `model.dtype`."""
    quantization: Optional[Literal["fp8", "fp8_per_tensor"]] = None
    """The engine's linear layers in float8_e4m3fn, quantised in each refit; fp8: with a scale for each 128 x 128 block,
    as verl's; fp8_per_tensor: with one for each matrix, on the native engine. Wants a weight that corrects it:
    `algorithm.rollout_correction.preset=decoupled_token_is`."""
    tensor_model_parallel_size: int = 1
    """Ranks per replica; the replicas split the prompts."""
    num_ranks: int = 0
    """Ranks that only sample, the last ones of the job; the others only train, and `parallel` is their layout. 0: all
    ranks do both, in turns. Ranks of their own keep weights and KV cache whatever `free_cache_engine` says."""
    nnodes: int = 0
    """The same in nodes of `n_gpus_per_node` ranks; 0: see `num_ranks`."""
    n_gpus_per_node: int = 8
    """Ranks on a node of `nnodes`."""
    over_sample_rate: float = 0.0
    """Prompts begun beyond `train.batch_size`, as a part of it; at most 1 where `train.max_off_policy_steps` is set.
    Sampling stops once a batch is whole; what is not whole goes on in the next step, first, under the new weights."""
    over_age: Literal["wait", "drop"] = "wait"
    """What happens to a prompt that would become older than `train.max_off_policy_steps`, with `over_sample_rate`: its
    step waits for it, or its samples are dropped and it begins again, once."""
    mask_offpolicy: bool = False
    """Do not train the tokens of a response that older weights sampled than its last ones; with `over_sample_rate`, or
    `train.max_off_policy_steps` above 1."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages of a replica; above 1 with `trtllm_engine` only."""
    expert_parallel_size: int = 1
    """EP inside a replica: its ranks hold different experts; the rest of the replica cuts each of them."""
    moe_tensor_parallel_size: Optional[int] = None
    """Ranks of a replica that share each expert; null: what `expert_parallel_size` leaves of the replica."""
    max_num_seqs: int = 256
    """Sequences decoded at a time by a replica."""
    max_num_batched_tokens: int = 8192
    """Tokens in one forward of the engine."""
    enable_chunked_prefill: bool = True
    """Split a prompt where a forward is full; false: none, and those above `max_num_batched_tokens` are refused."""
    enable_prefix_caching: bool = True
    """Prefill a prompt once for its n samples; False: once per sample."""
    gpu_memory_utilization: float = 0.5
    """Part of the memory free at start that the KV cache may take, (0, 1); on a CPU, of free RAM."""
    free_cache_engine: bool = True
    """Free the KV cache between samplings, and the engine's weights while training."""
    enforce_eager: bool = False
    """No CUDA graphs; on a CPU the native engine compiles nothing."""
    true_on_policy: bool = False
    """Engine and actor compute by the same functions in the same order: the actor's log-probability of a sampled token
    is the engine's in every bit, and each step checks it before its update. On a CPU, `name=native`, dense models."""
    calculate_log_probs: bool = True
    """Must be true: sampling-time log-probabilities are pi_old."""
    enable_rollout_routing_replay: bool = False
    """Keep the experts that the engine chose for each token and layer, for `actor.router_replay=rollout`."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine by its own names, `{trtllm: {attn_backend: FLASHINFER, kv_cache_config: {dtype: fp8}}}`
    or `{vllm: {kv_cache_dtype: fp8}}`. Those that other keys decide are refused."""
    val_kwargs: ValConfig = field(default_factory=ValConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and response."""
        return self.max_model_len or self.prompt_length + self.response_length

    @property
    def longest_prompt(self) -> int:
        """Tokens that an engine reads at most before it samples: of an episode's later turns all before it."""
        return self.longest if self.multi_turn.enable else self.prompt_length


@dataclass(frozen=True)
class OverlongConfig:
    """DAPO's treatment of long responses (arXiv 2503.14476, section 3.4)."""

    buffer_length: int = 0
    """Tokens before `rollout.response_length` over which the penalty grows linearly; 0: no penalty."""
    penalty: float = 1.0
    """Penalty at full length, subtracted from the reward."""
    mask_truncated: bool = False
    """Do not train on responses cut at `rollout.response_length`."""


@dataclass(frozen=True)
class KlCtrlConfig:
    """The coefficient of a KL in the reward (verl's `kl_ctrl`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: `kl_coef` is where it begins; after each step it moves towards `target_kl`."""
    target_kl: float = 0.1
    """Mean over the responses of their mean KL per token, nats, above 0."""
    horizon: int = 10000
    """Responses in which the coefficient changes by a fifth at most."""


@dataclass(frozen=True)
class EntropyCtrlConfig:
    """The coefficient of the entropy bonus (TRL's `use_adaptive_entropy`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: `entropy_coef` is where it begins; it moves after each optimizer step, and there is no bonus while the
    entropy is above its target."""
    target_entropy: float = 0.2
    """Mean over the trained tokens, nats, above 0."""
    delta: float = 0.005
    """What an optimizer step adds or takes away, above 0."""
    min_coef: float = 0.0
    """Lower bound of the coefficient."""
    max_coef: float = 1.0
    """Upper bound, not below the lower one."""


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction of samples that another policy drew than the one that trains; names and meanings are verl's."""

    preset: Optional[str] = None
    """Name of one of verl's (`mrl/config/verl_keys/verl_presets.py`), which sets the fields below; of these only
    thresholds may be set beside it. null: none; but decoupled_token_is where `train.mode=async` samples ahead of the
    updates and no field of the section is set."""
    bypass_mode: Optional[bool] = None
    """Denominator of the clipped ratio: true: the log-probabilities captured while sampling; false ("decoupled"): the
    actor's own at the rollout weights, from the update or a pass before it. null: true, or the preset's."""
    loss_type: Optional[Literal["ppo_clip", "reinforce"]] = None
    """With `bypass_mode`: ppo_clip: the algorithm's loss, whose ratio is the weight; reinforce: -w A log pi with the
    weight w of `rollout_is`. null: ppo_clip, or the preset's."""
    rollout_is: Optional[Literal["token", "sequence"]] = None
    """Multiply the loss by exp(l) of each token, or of the sum of l over the response; l is the actor's minus the
    sampler's log-probability, the actor's at the rollout weights, in bypass mode as it is. null: no weights."""
    rollout_is_threshold: Optional[str] = None
    """2.0: weights above are cut to it; 0.5_5.0 (IcePop): weights outside are 0. null: 2.0, or the preset's."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean: over the step's batch, in bypass mode over the minibatch."""
    rollout_rs: Optional[str] = None
    """Train only where all of a comma list hold: token_, seq_sum_, seq_mean_ (geometric) or seq_max_ with k1 (-l), k2
    (l^2/2) or k3 (e^l - 1 - l); or binary_kl (KPop), the larger KL of the sampled token against all others."""
    rollout_rs_threshold: Optional[str] = None
    """Bound of each, comma separated, or one for all. k1: 0.5_2.0 bounds e^-l, one number f means 1/f to f; others: the
    largest that is kept. null: the preset's."""
    rollout_rs_denominator: Literal["all", "kept"] = "all"
    """Tokens that the loss and the metrics are a mean over: with those that `rollout_rs` rejects, so that what is kept
    weighs the same however much is rejected; or without."""
    off_policy_mask_threshold: Optional[float] = None
    """OPSM (arXiv 2512.02556): no policy loss for a response with a negative advantage where the mean of the sampler's
    minus the actor's log-probability is above this; null: off."""

    @property
    def takes_sampled(self) -> bool:
        """Whether the log-probabilities captured while sampling enter the loss."""
        acting = self.acting
        corrects = acting.rollout_is or acting.rollout_rs or acting.off_policy_mask_threshold is not None
        return bool(acting.bypass_mode or corrects)

    @property
    def acting(self) -> RolloutCorrectionConfig:
        """With the preset's fields, and what is left open, filled in; a name that is no preset counts as null."""
        given: dict[str, Any] = {
            item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None
        }
        filled: dict[str, Any] = (
            {"bypass_mode": True, "loss_type": "ppo_clip"} | PRESETS.get(self.preset or "", {}) | given
        )
        if filled.get("rollout_is"):
            filled = {"rollout_is_threshold": "2.0"} | filled
        return RolloutCorrectionConfig(**filled)


@dataclass(frozen=True)
class SapoConfig:
    """Of `algorithm.policy_loss=sapo` (verl's names)."""

    tau_pos: float = 1.0
    """How fast the gate closes where the advantage is above 0."""
    tau_neg: float = 1.05
    """How fast it closes elsewhere."""


@dataclass(frozen=True)
class VespoConfig:
    """Of `algorithm.policy_loss=vespo` (TRL's `vespo_*`): the kernel w^k exp(lambda (1 - w))."""

    k_pos: float = 2.0
    """k where the advantage is at least 0."""
    lambda_pos: float = 3.0
    """lambda where the advantage is at least 0."""
    k_neg: float = 3.0
    """k where the advantage is below 0."""
    lambda_neg: float = 2.0
    """lambda where the advantage is below 0."""


@dataclass(frozen=True)
class DppoConfig:
    """Of `algorithm.policy_loss=dppo_tv` and `dppo_kl`, which bound the divergence by `clip_low` and `clip_high`."""

    ratio_cap: float = 20.0
    """Bound of the ratio as a weight (verl's `clip_ratio_c`)."""


@dataclass(frozen=True)
class ClipCovConfig:
    """Of `algorithm.policy_loss=clip_cov` (verl's names): which tokens are dropped."""

    clip_cov_ratio: float = 2e-4
    """Part of the minibatch's trained tokens, at least one, drawn where the covariance is between the bounds."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance with the advantage."""
    clip_cov_ub: float = 5.0
    """Upper bound, above the lower one."""


@dataclass(frozen=True)
class KlCovConfig:
    """Of `algorithm.policy_loss=kl_cov` (verl's names): which tokens are held back, and how much."""

    kl_cov_ratio: float = 2e-4
    """Part of the minibatch's trained tokens, at least one, with the largest covariance with the advantage."""
    ppo_kl_coef: float = 0.1
    """Factor of |log ratio| at these."""


@dataclass(frozen=True)
class DroConfig:
    """Of `algorithm.policy_loss=dro` (verl's name)."""

    dro_beta: float = 1.0
    """Factor of half the squared log ratio, which holds the policy near the one that sampled; verl has no default."""


@dataclass(frozen=True)
class DpoConfig:
    """Of `algorithm.name=dpo`, with TRL's names."""

    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero"] = "sigmoid"
    """Loss of a pair. sigmoid_norm and ipo divide each response's log ratio by its length."""
    beta: float = 0.1
    """How strongly the policy is held to the reference, above 0; of ipo it is the paper's tau."""
    label_smoothing: float = 0.0
    """Part of the pairs whose labels are taken to be the wrong way round, [0, 0.5); of robust."""
    sft_loss_weight: float = 0.0
    """Factor of the mean negative log-likelihood of the chosen responses' tokens, which is added to the loss."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and loss. null means "what the named algorithm defines" (`mrl/algorithms/<name>.py`)."""

    name: FilePath = "grpo"
    """File in `mrl/algorithms`, or 'package.module:Class', or 'path/to/file.py:Class'."""
    advantage_std: Optional[Literal["unbiased", "population", "none"]] = None
    """Divisor of group-relative advantages: sample (n-1) or population (n) deviation, or none."""
    advantage_eps: Optional[float] = None
    """Added to the deviation (ppo, vapo: to the variance), above 0."""
    advantage_std_over: Literal["group", "batch"] = "group"
    """Whose deviation: that of the prompt's rewards, or of all rewards of the step (TRL's `scale_rewards=batch`)."""
    credit: Literal["episode", "turn"] = "episode"
    """Which rewards a turn of an episode answers for: episode: all; turn: all but those that the environment gave for
    the turns before it, and it is compared with the same turn of the prompt's other samples."""
    gamma: Optional[float] = None
    """Discount of the reward of later tokens, (0, 1]; with a critic."""
    lam: Optional[float] = None
    """Lambda of generalised advantage estimation, [0, 1]; with a critic."""
    value_lam: Optional[float] = None
    """Lambda of the returns that the critic learns (VAPO's decoupled GAE), [0, 1]; null: `lam`."""
    lam_length_alpha: Optional[float] = None
    """Advantages of a response of l tokens have lambda 1 - 1 / (alpha l) in place of `lam` (VAPO); 0: off."""
    singleton_group: Optional[Literal["error", "zero", "reward"]] = None
    """Advantage of a group with one sample: refuse, 0, or its raw reward; of several of which one has a score: 0."""
    loss_aggregation: Optional[
        Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
    ] = None
    """How per-token losses become one number; all counts are global over the minibatch."""
    policy_loss: Optional[
        Literal[
            "vanilla",
            "gspo",
            "luspo",
            "cispo",
            "sapo",
            "gmpo",
            "vespo",
            "dppo_tv",
            "dppo_kl",
            "gpg",
            "clip_cov",
            "kl_cov",
            "dro",
        ]
    ] = None
    """Which loss the advantages go into, see [objectives](objectives.md). One that is not the algorithm's own brings
    its own clip and aggregation where these are null."""
    loss_norm_length: Optional[int] = None
    """Divisor of seq_mean_token_sum_norm, tokens; null: `rollout.response_length`."""
    clip_low: Optional[float] = None
    """Ratio is kept >= 1 - clip_low, (0, 1]; gmpo: its logarithm >= -clip_low; dppo: bound of the divergence."""
    clip_high: Optional[float] = None
    """Ratio is kept <= 1 + clip_high, above 0; gmpo: its logarithm <= clip_high; dppo: bound of the divergence."""
    dual_clip: Optional[float] = None
    """Lower bound c > 1 of the loss for negative advantages (arXiv 1912.09729); 0: off."""
    kl_in: Literal["none", "loss", "reward"] = "none"
    """Where the KL to the reference goes."""
    kl_coef: float = 0.001
    """Factor of the KL."""
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    """http://joschu.net/blog/kl-approx.html; with +: that value with the gradient of k2, in the loss only."""
    kl_unbiased: bool = False
    """Multiply the KL in the loss by the ratio pi / pi_old, which corrects it for samples of an older policy."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus, subtracted from the loss."""
    entropy_ctrl: EntropyCtrlConfig = field(default_factory=EntropyCtrlConfig)
    positive_example_nll_weight: float = 0.0
    """Factor of the mean negative log-likelihood of the correct samples' tokens, which is added to the loss."""
    top_entropy_quantile: float = 1.0
    """Part of the minibatch's trained tokens, those with the highest entropy, that the policy loss acts on, (0, 1]; it
    is divided by the count of all (TRL's name)."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    dynamic_sampling: Optional[bool] = None
    """Drop groups whose rewards are all equal and sample more prompts until the batch is full."""
    max_sampling_rounds: int = 10
    """Rounds after which dynamic sampling goes on with what it has."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    vespo: VespoConfig = field(default_factory=VespoConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    kl_cov: KlCovConfig = field(default_factory=KlCovConfig)
    dro: DroConfig = field(default_factory=DroConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One term of the reward."""

    name: FilePath = "exact_match"
    """File in `mrl/rewards`, or 'package.module:function', or 'path/to/file.py:function'."""
    weight: float = 1.0
    """Factor in the sum; 0: measured as `reward/<name>/mean`, and not part of it."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    batch: Optional[Literal["group", "replica"]] = None
    """Samples that a function of lists (TRL's, verl's batch functions) is called with: those of one prompt, or all that
    a replica has sampled; null: group."""


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model: what its head gives at the last token of prompt and response, in the actor's layout."""

    path: Optional[FilePath] = None
    """Hugging Face folder of a sequence classifier with one label (`score.weight`), of any family of the actor's kind;
    or its name on the hub. null: none."""
    weight: float = 1.0
    """Factor of its score in the reward; 0: measured as `reward/model/mean`, and not part of it."""
    retokenize: Optional[bool] = None
    """It reads the text anew, by its own tokenizer and chat template; false: the actor's token ids; null: these where
    both tokenizers have the same vocabulary."""


@dataclass(frozen=True)
class RewardConfig:
    """How a response becomes a number: the weighted sum of the functions and of the reward model's score."""

    functions: list[RewardFunctionConfig] = field(default_factory=lambda: [RewardFunctionConfig()])
    """The terms; a list in YAML replaces this one, and may be empty where there is a reward model."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    time_limit_s: float = 10.0
    """A sample that takes longer counts as failed, s; a call with several may take as many times as long, and judges
    have a `limit_s` of their own."""
    num_workers: int = 1
    """Worker processes per replica for functions that need one."""
    memory_limit_mb: int = 8192
    """A worker, with all that its functions start, may take this much, MiB; 0: as much as there is."""
    cache_mb: int = 64
    """Scores of workers and judges kept in the run folder, MiB per replica: no sample is scored twice; 0: none."""
    error_value: Optional[float] = None
    """Reward of a sample whose function failed; null: it has none, so it is neither trained nor in any mean."""
    max_failed_frac: float = 0.5
    """The job stops when more than this part of a step's samples failed, [0, 1]."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts."""

    task: Optional[FilePath] = None
    """Generator in `mrl/data/synthetic_tasks.py` ("addition"), or a path as for rewards; null: files."""
    task_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the generator."""
    train_files: list[FilePath] = field(default_factory=list)
    """JSONL or parquet."""
    val_files: list[FilePath] = field(default_factory=list)
    """Held-out prompts; empty: no evaluation."""
    prompt_key: str = "prompt"
    """Column: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the ground truth; rows without "answer" that have verl's "reward_model.ground_truth" give that."""
    response_key: Optional[str] = None
    """Column with the response that supervised steps imitate, a text or chat messages; null: the answer."""
    chosen_key: str = "chosen"
    """Column with the better of two responses, a text or chat messages; of `algorithm.name=dpo`. Rows without
    `prompt_key` have whole conversations here and in `rejected_key`, whose prompt is what they begin with alike."""
    rejected_key: str = "rejected"
    """Column with the worse one."""
    messages_key: str = "messages"
    """Column with a whole conversation, in rows without `prompt_key`: the prompt is what comes before the assistant's
    last turn, and supervised steps imitate the assistant."""
    train_on_turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns supervised steps imitate; everything else is masked. last: also with chat
    templates that render a turn otherwise once the conversation goes on."""
    overlong_responses: Literal["error", "truncate_right"] = "error"
    """What happens to responses of supervised steps longer than `rollout.response_length`, and to conversations longer
    than that and `rollout.prompt_length`."""
    source_key: Optional[str] = None
    """Column that names a row's data set; null: "data_source" where a row has it, else the task, or the file's stem."""
    system_prompt: Optional[str] = None
    """Put before chat messages that have none."""
    chat_template: Optional[FilePath] = None
    """File with a Jinja chat template; null: the tokenizer's."""
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: to chat messages, not to strings."""
    split_special_tokens: bool = True
    """Special tokens such as `<|im_end|>` that messages of users, tools and environments quote stay ordinary text, as
    with the tokenizers' switch of this name: only the model and the template begin and end a turn. false: they
    become control tokens, as TRL, verl and vLLM do it. Prompts that are strings are always read with their tokens."""
    shuffle: bool = True
    """A new order in every epoch, from `run.seed`."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What happens to prompts longer than `rollout.prompt_length`."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Commit points."""

    interval: int = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = 2
    """Newest checkpoints kept, at least 1."""
    keep_best: int = 0
    """Also keep this many with the best `best_metric`."""
    best_metric: str = "val/accuracy"
    """Metric that ranks checkpoints, larger is better."""
    export_hf: bool = False
    """Also write each checkpoint as a Hugging Face folder."""
    async_save: bool = False
    """Write a checkpoint from copies in host memory while training goes on; it counts once it is whole."""


@dataclass(frozen=True)
class ObserveConfig:
    """What a run shows."""

    console: Literal["rich", "plain", "off"] = "rich"
    """Progress on the terminal; rich falls back to plain where there is no terminal."""
    num_samples: int = 4
    """Sample generations kept in samples.jsonl and shown per evaluation."""
    tensorboard: bool = True
    """Event files in the run folder."""
    wandb_project: Optional[str] = None
    """Weights & Biases project; null: off."""
    report: bool = True
    """Write report.html when the run ends."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


LearnsFrom = Literal["samples", "responses", "pairs"]
"""What an algorithm learns from: samples of the engine, responses in the data, or pairs of a better and a worse one."""

OWN_CODE = ("rollout.name", "algorithm.name", "reward.functions[*].name", "data.task")
"""Fields that may name code of a user's own."""


def load(source: str | Path | Mapping[str, Any], overrides: str | Sequence[str] = ()) -> Config:
    """The config of a YAML file, or of nested dicts, and overrides in their order, every field typed and known.

    - `section.key=value` sets a field; `reward.functions[0].weight=2` reaches into a list.
    - A list is replaced whole (`data.val_files=[a.jsonl,b.jsonl]`); `data.val_files=a.jsonl` is a list of one.
    - A mapping is merged (`data.task_kwargs={max_value: 9}`); `data.task_kwargs={}` empties it.
    - `~section.key` takes back what was set, a whole section too; `~data.task_kwargs.max_value` removes an item.
    - A path to code of one's own is looked for in the file's folder, then in the working folder, and becomes absolute.

    Raises:
        UserError: The file is missing or not YAML, a key is unknown (the nearest is named), or a type is wrong; a file
            of code does not exist.
    """
    values = Values(Config)
    folders = [Path()]
    if isinstance(source, Mapping):
        where, raw = "in the mapping", dict(source)
    elif isinstance(source, (str, Path)):
        where, raw = f"in '{source}'", _read(source)
        folders.insert(0, Path(source).parent)
    else:
        raise UserError(f"{shown(source)} is no config. Give the path of a YAML file, or a dict of sections.")
    values.update(raw, where)
    for item in [overrides] if isinstance(overrides, str) else overrides:
        values.override(item)
    values.locate(OWN_CODE, folders)
    config: Config = values.made(f"{where} or an override")
    return config


def to_yaml(config: Config) -> str:
    """Every field of the config as YAML; `load` reads it back to an equal config."""
    dumper = get_omega_conf_dumper()  # OmegaConf.to_yaml first makes nodes of all fields, in four times as long
    text = yaml.dump(asdict(config), Dumper=dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return str(text)


def _read(path: str | Path) -> Any:
    if not os.path.isfile(path):
        raise UserError(
            f"config file '{path}' does not exist.{did_you_mean_path(path)} Give the path of a YAML file such as "
            "configs/quickstart.yaml."
        )
    return read_yaml(Path(path), "config file")
