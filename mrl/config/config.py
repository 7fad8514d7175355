"""Every setting of mrl with its default, and `load`, which reads a YAML file with overrides into a `Config`.

Defaults are defined only here; YAML files contain the differences. Ranges and rules between fields are in
`trainer/validation/`, which checks them before any process group exists. Imports no torch.

The string under a field is its documentation (unit and range); `mrl/docs/config.md` is generated from it. `None` in
`algorithm` means the default of the named algorithm; the run folder contains the resolved value.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Optional

import yaml
from omegaconf._utils import get_omega_conf_dumper

from mrl.config.packaged import did_you_mean_config, find_config
from mrl.config.paths import FilePath, OutputPath, TokenizerPath
from mrl.config.user_code import is_code_not_column
from mrl.config.values import Values
from mrl.config.verl_keys.verl_presets import PRESETS
from mrl.config.yaml_file import read_yaml
from mrl.errors import Mistakes, UserError, shown


@dataclass(frozen=True)
class RunConfig:
    """Run folder, device and time limits of the process."""

    output_dir: OutputPath = "runs/default"
    """Run folder; contains every file that a run writes. On a local or shared file system, not in object storage."""
    seed: int = 0
    """Seed of initial weights, data order and sampling."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the last checkpoint of the run folder if there is one; never: refuse a folder that has one;
    must: refuse to start without one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a device, else CPU with gloo."""
    num_threads: int = 0
    """CPU threads per rank; 0: cores divided by the ranks of this host."""
    collective_timeout_s: float = 600.0
    """Longest wait of a rank in one collective, s; more only while the ranks that it waits for are generating. Then the
    job ends with an error that names these ranks."""
    heartbeat_timeout_s: float = 45.0
    """Longest time without a heartbeat of a rank, s. Then the job ends: the rank's process or host died or is
    stopped."""
    max_time_s: float = 0.0
    """Run time of this process, s: stop with a checkpoint before a step that would exceed it; 0: no limit. SLURM's time
    limit is respected without this setting."""
    stop_timeout_s: float = 90.0
    """Time from SIGUSR1 to the end of the process, s. It is extended to the time of a step and a checkpoint, at most to
    SLURM's time limit. launch/slurm.sbatch requests the signal 120 s before that; if a step and a checkpoint take
    longer, raise both."""
    term_timeout_s: float = 25.0
    """Time from SIGTERM to the end of the process, s. SLURM (KillWait) and most launchers kill after 30 s; raise it if
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
class EarlyStoppingConfig:
    """End of a run whose evaluations no longer improve."""

    patience: int = 0
    """Evaluations in a row without improvement that end the run, with a checkpoint and status 0; 0: off. Evaluations
    during `train.critic_warmup` are not counted."""
    metric: str = "val/accuracy"
    """Evaluation metric that must improve."""
    mode: Literal["max", "min"] = "max"
    """max: larger is better; min: smaller is better."""
    min_delta: float = 0.0
    """An improvement exceeds the best value so far by more than this."""


@dataclass(frozen=True)
class TrainConfig:
    """Training loop: steps, batch size, synchronous or asynchronous mode."""

    num_steps: Optional[int] = None
    """Reinforcement learning steps (rollout, update); null: derived from `num_epochs`, or 100 if that is null too."""
    num_epochs: Optional[float] = None
    """Passes over the training rows. The run ends when less than a batch of rows is left, or after `num_steps`."""
    batch_size: int = 32
    """Prompts per step; each is sampled `rollout.n` times."""
    minibatch_size: Optional[int] = None
    """Prompts per optimizer step; null: `batch_size`. Must divide it."""
    critic_warmup: int = 0
    """First steps, which train only the critic (value pretraining of VAPO; verl's key of this name counts one step
    fewer)."""
    mode: Literal["sync", "async"] = "sync"
    """sync: a step trains on samples of the current weights. async: sampling runs concurrently with the updates, so
    samples come from older weights; runs are as reproducible as with sync."""
    max_off_policy_steps: Optional[int] = None
    """Staleness bound: most steps between the weights that sampled a token and those that train on it; 0 with async
    gives the run of sync. null: 1 with async, and no bound with `rollout.over_sample_rate`."""
    eval_interval: int = 0
    """Steps between evaluations on the held-out prompts; 0: only before the first and after the last step."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass(frozen=True)
class ModelConfig:
    """Model to train."""

    path: Optional[FilePath] = None
    """Hugging Face folder (config.json, safetensors, tokenizer) or hub name; null: `preset`."""
    preset: Optional[str] = None
    """Name in `mrl/models/presets.py`; initial weights are random."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """config.json keys that replace the preset's (hidden_size, num_hidden_layers, ...); presets only."""
    tokenizer: Optional[TokenizerPath] = None
    """Folder with a Hugging Face tokenizer, "char:<characters>", or "bytes:" for one token per byte of UTF-8; null: the
    tokenizer of the model folder."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations of actor and reference; the optimizer keeps fp32 master weights."""


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout of actor and reference (Megatron's names); the data-parallel size follows from the world size."""

    tensor_model_parallel_size: int = 1
    """TP: ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """PP: pipeline stages."""
    virtual_pipeline_model_parallel_size: Optional[int] = None
    """Model chunks per stage (interleaved schedule); needs PP above 1."""
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP along the sequence over TP; needs TP above 1."""
    context_parallel_size: int = 1
    """CP: ranks that share the tokens of each microbatch."""
    expert_model_parallel_size: int = 1
    """EP: ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: Optional[int] = None
    """ETP: ranks that share each expert; null: TP. Can differ from TP only with EP above 1."""
    num_layers_in_first_pipeline_stage: Optional[int] = None
    """Layers of the first stage; null: the same as the other stages."""
    num_layers_in_last_pipeline_stage: Optional[int] = None
    """Layers of the last stage; null: the same as the other stages."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its learning rate and the memory of a trained model; the part that `actor` and `critic` share."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the schedule."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up, over all of the model's optimizer steps. wsd: constant, then linear to `min_lr`
    (warm-up, stable, decay)."""
    lr_decay_frac: float = 0.1
    """Fraction of the optimizer steps in which wsd decays, at the end, (0, 1]."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_warmup_frac: float = 0.0
    """The same as a fraction of the optimizer steps, rounded down, [0, 1]; only without `lr_warmup_steps`."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW); not applied to norms and biases."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment."""
    adam_beta2: float = 0.95
    """Decay rate of the second moment."""
    adam_eps: float = 1e-8
    """Epsilon of Adam's denominator."""
    clip_grad: float = 1.0
    """Maximum of the global gradient norm; 0: no clipping."""
    param_offload: bool = False
    """Keep the weights in host memory outside the model's own phases."""
    grad_offload: bool = False
    """Free the gradient buffers between updates; they are not copied."""
    optimizer_offload: bool = False
    """Keep master weights and moments in host memory except during updates and checkpoints."""


ALL_LINEAR = "all-linear"
"""Entry of `actor.lora.target_modules` that names all projections of attention and MLP."""


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA) of a model: only they are trained, the model's own weights stay as they are."""

    rank: int = 0
    """Rank of the adapters; 0: none, all weights are trained."""
    alpha: float = 32.0
    """The product of a pair of adapters is multiplied by alpha / rank."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rank-stabilized LoRA)."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Modules with adapters, by the end of their Hugging Face names: q_proj, mlp.down_proj, layers.3.mlp.up_proj. An
    entry all-linear: all projections of attention and MLP, experts included; the MoE router, embeddings and output
    layer never have adapters."""
    exclude_modules: list[str] = field(default_factory=list)
    """Modules without adapters although `target_modules` names them."""
    share_expert_adapters: bool = False
    """One pair for each projection of a layer's experts, the same for all of them, instead of one for each expert
    (Megatron-Bridge's name). The shared expert has its own."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Random initial values of the first adapter of a pair, lora_A; the second is zero. kaiming: uniform within
    1 / sqrt(inputs), as PEFT does by default; gaussian: normal with standard deviation 1 / rank."""
    dtype: Optional[Literal["float32", "bfloat16"]] = None
    """Data type of the adapters; null: `model.dtype`."""
    adapter_path: Optional[FilePath] = None
    """PEFT folder (adapter_config.json, adapter_model.safetensors) with the initial adapters; null: new ones. The
    folder also sets `rank`, `alpha`, `use_rslora`, `target_modules` and `exclude_modules` where the config does not;
    others than the folder's are refused."""
    loraplus_lr_ratio: float = 1.0
    """Learning rate of lora_B divided by that of lora_A, which is `actor.lr` (LoRA+)."""


@dataclass(frozen=True)
class LoraConfig(AdapterConfig):
    """Low-rank adapters of the actor."""

    merge: bool = True
    """Weight sync: true: send all weights, with the adapters merged into them; false: the engine keeps the model's
    weights (native: on the device; vllm: on the host while the actor trains), and each sync sends only the adapters."""


@dataclass(frozen=True)
class ActorConfig(OptimizerConfig):
    """Optimizer, and forward and backward of the training model."""

    ppo_epochs: int = 1
    """Passes over the samples of each step (verl's name)."""
    max_tokens_per_microbatch: int = 16384
    """Most tokens of a microbatch; sequences are packed up to it."""
    use_prefix_grouper: bool = True
    """Compute a shared prompt prefix once per microbatch instead of once per sample, with the same losses and gradients
    (verl's name)."""
    transformer_impl: Literal["auto", "te", "local"] = "auto"
    """te: TransformerEngine's layers; local: Megatron's own; auto: TransformerEngine if it supports the run (GPUs,
    bfloat16). The log names the choice."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    overlap_grad_reduce: Optional[bool] = None
    """Reduce gradients during the backward pass; null: only with TransformerEngine."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: selective: core attention only; full: complete layers."""
    logprob_chunk_tokens: int = 1024
    """Rows of logits that are converted to fp32 at a time."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """MoE token dispatcher. allgather pads the microbatches of all ranks to the longest and needs PP of 1; flex is
    DeepEP or HybridEP (`moe_flex_dispatcher_backend` in `megatron.transformer`), on GPUs."""
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = "fp32"
    """Data type of the router's logits and probabilities; null: `model.dtype`."""
    moe_router_load_balancing_type: Literal["none", "aux_loss"] = "none"
    """aux_loss: also minimise the load imbalance between experts, per microbatch."""
    moe_aux_loss_coeff: float = 0.0
    """Coefficient of the load balancing loss of each layer."""
    moe_z_loss_coeff: float = 0.0
    """Coefficient of the z-loss of each layer: mean square of the log-sum-exp of the router's logits; 0: off."""
    moe_router_bias_update_rate: float = 0.0
    """Change of each expert's selection bias per optimizer step, up if fewer tokens than the mean went to it, down if
    more (GLM-4.5, DeepSeek-V3); 0: the biases stay as they are."""
    router_replay: Literal["none", "recompute", "rollout"] = "none"
    """Router replay: updates send tokens to recorded experts, weighted by the actor's current router. rollout ("R3"):
    those of the engine; recompute ("R2"): those of the actor when it scored the samples at the rollout weights, with
    any engine. recompute needs `algorithm.rollout_correction.bypass_mode=false`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters."""


@dataclass(frozen=True)
class CriticConfig(OptimizerConfig):
    """Critic of ppo and vapo; its parallel layout, microbatches and recompute are the actor's."""

    path: Optional[FilePath] = None
    """Hugging Face folder of any family with the actor's vocabulary. The value head is its `score.weight`, else zeros.
    null: the actor's initial weights and a value head of zeros."""
    ppo_epochs: Optional[int] = None
    """Passes over the samples of each step; null: `actor.ppo_epochs`."""
    cliprange_value: float = 0.5
    """Value clipping: the loss is the larger one of the value and of the value clipped to within this distance of the
    value before the updates; 0: off."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """Aggregation of the value loss over tokens, with the choices of `algorithm.loss_aggregation`."""
    lr: float = 1e-5
    """Peak learning rate."""
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    """Low-rank adapters of the critic, trained together with its value head: beside the actor's frozen weights, in the
    same memory (with `actor.lora`), or beside those of `path`."""


@dataclass(frozen=True)
class MegatronConfig:
    """Fields of Megatron's configuration classes, passed through unchanged; mrl sets those that are not named here."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Fields of `TransformerConfig` by Megatron's names: attention_backend, recompute_modules, moe_permute_fusion,
    ..."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of `DistributedDataParallelConfig`: overlap_param_gather, bucket_size, ..."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of `OptimizerConfig`."""
    unchecked: bool = False
    """Accept fields that change the model or need code that mrl lacks, with a warning instead of an error. Fields that
    other keys of the config set stay refused."""


@dataclass(frozen=True)
class ReferenceConfig:
    """Frozen policy of the KL term; created only if `algorithm.kl_in` is not "none"."""

    path: Optional[FilePath] = None
    """Hugging Face folder; null: the actor's weights when the KL starts (at the start, or in the resume that enables
    it)."""
    update_interval: int = 0
    """Steps between copies of the actor into the reference; 0: never."""


SAMPLED = ("k1", "k2", "k3", "abs")
"""Values of `distillation.distillation_loss.loss_mode` that need only the teacher's log-probability of the sampled
token."""

TOP_K = "forward_kl_topk"
"""Value of `distillation.distillation_loss.loss_mode` that needs the teacher's `topk` most likely tokens."""


@dataclass(frozen=True)
class TeacherConfig:
    """One teacher of `distillation.teacher_models`."""

    key: Optional[str] = None
    """Value of the column `distillation.teacher_key` in the rows that this teacher scores; null for a single
    teacher."""
    model_path: Optional[FilePath] = None
    """Hugging Face folder or hub name, with the student's tokenizer; null: `preset`."""
    preset: Optional[str] = None
    """Name in `mrl/models/presets.py`, with the student's vocabulary. Random weights, for planning and rehearsals."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """config.json keys that replace the preset's, see `model.overrides`."""


@dataclass(frozen=True)
class DistillationLossConfig:
    """Distillation loss, computed on the student's samples at `rollout.temperature`."""

    loss_mode: Literal["k1", "k2", "k3", "abs", "forward_kl_topk", "reverse_kl", "forward_kl", "jsd"] = "k3"
    """k1, k2, k3, abs: KL estimators at the sampled token (`algorithm.kl_estimator`); forward_kl_topk: over the
    teacher's `topk` tokens; reverse_kl, forward_kl, jsd: exact, over the complete vocabulary."""
    topk: int = 32
    """Teacher tokens per position that forward_kl_topk uses."""
    beta: float = 0.5
    """Weight of the teacher in the average distribution of jsd, (0, 1); towards 0 it becomes forward_kl, towards 1
    reverse_kl."""
    use_task_rewards: bool = True
    """Add the distillation loss to the algorithm's loss; false: minimise the distillation loss alone."""
    distillation_loss_coef: float = 1.0
    """Factor of the distillation loss where it is added to the algorithm's loss."""
    loss_max_clamp: Optional[float] = None
    """A token's loss is clamped to plus or minus this value, outside of which it has no gradient; null: off."""
    log_prob_min_clamp: Optional[float] = None
    """Lower clamp of the log-probabilities in forward_kl_topk, nats; null: off."""
    use_policy_gradient: bool = False
    """Use the negative of a token's loss as its advantage in a clipped surrogate, instead of differentiating the loss;
    with k1, k2, k3 and abs."""
    clip_ratio_low: float = 0.2
    """Lower clip of that surrogate, see `algorithm.clip_low`; its `dual_clip` is 3."""
    clip_ratio_high: float = 0.2
    """Upper clip of that surrogate, see `algorithm.clip_high`."""

    @property
    def is_sampled(self) -> bool:
        """True if the loss needs only the teacher's log-probability of the sampled token."""
        return self.loss_mode in SAMPLED


@dataclass(frozen=True)
class DistillationConfig:
    """Teachers that score the samples of the student (on-policy distillation, verl's names)."""

    enabled: bool = False
    """Load the teachers and add their loss."""
    teacher_models: list[TeacherConfig] = field(default_factory=list)
    """Teachers; their layers may differ from the student's if the actor supports the family."""
    teacher_key: str = "data_source"
    """Column of the data row that selects the teacher, if there are several."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)


@dataclass(frozen=True)
class ValConfig:
    """Sampling for evaluation (verl's `val_kwargs`); settings that are not listed here are those of training."""

    n: int = 1
    """Samples per held-out prompt."""
    do_sample: bool = False
    """false: greedy."""
    temperature: float = 1.0
    """Used with `do_sample`; 0: greedy too."""
    top_k: int = -1
    """Number of most likely tokens to sample from; -1: all."""
    top_p: float = 1.0
    """Nucleus mass, (0, 1]."""
    min_p: float = 0.0
    """Smallest probability as a fraction of the largest, [0, 1); see `rollout.min_p`."""

    @property
    def greedy(self) -> bool:
        """True if evaluation takes the most likely token."""
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class CheckpointEngineConfig:
    """Weight sync from the actor into the engine (verl's section name)."""

    update_weights_bucket_megabytes: int = 2048
    """Largest staging buffer of a weight sync, MiB; larger tensors are split. A rank allocates two to send and two to
    receive."""
    canary: Optional[bool] = None
    """Weight-sync self-test: sync twice at the start and compare the responses to fixed prompts; null: only with
    TensorRT-LLM and vLLM."""


@dataclass(frozen=True)
class MultiTurnConfig:
    """Multi-turn episodes with an environment, instead of single responses (verl's names and defaults)."""

    enable: bool = False
    """true: each sample is an episode with `rollout.agent.environment`; `response_length` limits all of its tokens."""
    max_assistant_turns: Optional[int] = None
    """Most turns of the policy; the environment still returns the reward of the last one. null: limited only by
    `response_length`."""
    max_user_turns: Optional[int] = None
    """Most replies of the environment in the policy's context; null: limited only by `response_length`."""
    max_parallel_calls: int = 1
    """Most tool calls per turn; further calls are not executed, and the policy gets a message about them."""
    max_tool_response_length: int = 256
    """Characters of a tool's response that the policy sees; longer ones are truncated."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Part of a longer tool response that remains, as in verl: left: its beginning; right: its end; middle: half of
    each."""
    format: str = "hermes"
    """Syntax of a tool call: hermes, llama3_json or qwen3_coder (vLLM's names)."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """Check at the start that the chat template only appends when an episode grows: strict: exactly; ignore_strippable:
    except for white space; disable: no check. Sampled tokens are trained unchanged in any case."""


@dataclass(frozen=True)
class AgentConfig:
    """Environment of multi-turn episodes, and its worker processes."""

    environment: Optional[FilePath] = None
    """Name of a file in `mrl/environments/`, or a path to your own class."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    num_workers: int = 8
    """Worker processes per engine replica; environments run in them concurrently."""
    time_limit_s: float = 30.0
    """Longest time of one reply, s; then the sample fails and the worker is replaced."""
    memory_limit_mb: int = 2048
    """Memory of a worker and its child processes, MiB; 0: no limit."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding without a draft model (names of vLLM's `speculative_config`); the tokens stay the same."""

    method: Optional[Literal["ngram"]] = None
    """ngram: search the last tokens of a sequence earlier in it, and in other samples of its prompt, and draft what
    followed there. null: off."""
    num_speculative_tokens: int = 8
    """Most tokens drafted per sequence and forward."""
    prompt_lookup_max: int = 5
    """Longest n-gram to search, tokens; longer matches win."""
    prompt_lookup_min: int = 2
    """Shortest n-gram to search, tokens."""


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout engine and sampling distribution (verl's names)."""

    name: FilePath = "native"
    """Folder in `mrl/engines`, or 'package.module:Class', or 'path/to/file.py:Class'."""
    engine_dir: Optional[FilePath] = None
    """Folder of prebuilt engines for `trtllm_engine`, from tools/build_trtllm_engine.py."""
    n: int = 8
    """Samples per prompt (group size)."""
    temperature: float = 1.0
    """Sampling temperature, above 0; training log-probabilities use it too. Evaluations use `val_kwargs` for this and
    the next three fields."""
    top_k: int = -1
    """Number of most likely tokens to sample from; -1: all."""
    top_p: float = 1.0
    """Nucleus mass, (0, 1]."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this fraction of the largest, [0, 1)."""
    do_sample: bool = True
    """false: greedy."""
    ignore_eos: bool = False
    """Ignore end tokens and generate `response_length` tokens (benchmarks), in evaluations too."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response, in evaluations too; they are part of the response."""
    repetition_penalty: float = 1.0
    """Must be 1: training log-probabilities do not model a penalty."""
    prompt_length: int = 512
    """Longest prompt, tokens."""
    response_length: int = 512
    """Longest response, tokens."""
    max_model_len: Optional[int] = None
    """Longest sequence, prompt and response, tokens; null: `prompt_length` + `response_length`."""
    dtype: Optional[Literal["float32", "bfloat16"]] = None
    """Data type of the engine's weights and KV cache; null: `model.dtype`."""
    quantization: Optional[Literal["fp8", "fp8_per_tensor"]] = None
    """Quantize the engine's linear layers to float8_e4m3fn in each weight sync. fp8: one scale per 128 x 128 block, as
    in verl; fp8_per_tensor: one scale per matrix, native engine only. Use it with an importance weight:
    `algorithm.rollout_correction.preset=decoupled_token_is`."""
    tensor_model_parallel_size: int = 1
    """Ranks per replica; the replicas share the prompts."""
    num_ranks: int = 0
    """Ranks that only generate, the last ones of the job; the others only train, with the layout `parallel`. 0: all
    ranks do both, alternating. Ranks that only generate keep weights and KV cache in memory, whatever
    `free_cache_engine` is."""
    nnodes: int = 0
    """The same as `num_ranks`, in nodes of `n_gpus_per_node` ranks; 0: use `num_ranks`."""
    n_gpus_per_node: int = 8
    """Ranks per node of `nnodes`."""
    over_sample_rate: float = 0.0
    """Prompts started beyond `train.batch_size`, as a fraction of it; at most 1 if `train.max_off_policy_steps` is set.
    Sampling stops once a batch is complete; partial rollouts resume first in the next step, with the new weights."""
    over_age: Literal["wait", "drop"] = "wait"
    """Treatment of a prompt that would exceed `train.max_off_policy_steps`, with `over_sample_rate`. wait: the step
    waits for it; drop: its samples are dropped and it starts again, once."""
    mask_offpolicy: bool = False
    """Train only the tokens of a response that its newest weights sampled; needs `over_sample_rate`, or
    `train.max_off_policy_steps` above 1."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages of a replica; above 1 only with `trtllm_engine`."""
    expert_parallel_size: int = 1
    """EP inside a replica: ranks with different experts. Each expert is sharded over the remaining factor of the
    replica."""
    moe_tensor_parallel_size: Optional[int] = None
    """Ranks of a replica that share each expert; null: replica size / `expert_parallel_size`."""
    max_num_seqs: int = 256
    """Sequences that a replica decodes at a time."""
    max_num_batched_tokens: int = 8192
    """Most tokens in one forward of the engine."""
    enable_chunked_prefill: bool = True
    """Split a prompt that does not fit into a forward; false: prompts longer than `max_num_batched_tokens` are
    refused."""
    enable_prefix_caching: bool = True
    """Prefill a prompt once for its n samples; false: once per sample."""
    gpu_memory_utilization: float = 0.5
    """Fraction of the memory free at the start for the KV cache, (0, 1); on a CPU, of the free RAM."""
    free_cache_engine: bool = True
    """Free the KV cache between generation phases, and the engine's weights during training."""
    enforce_eager: bool = False
    """Do not use CUDA graphs; on a CPU the native engine compiles nothing."""
    true_on_policy: bool = False
    """Engine and actor use the same functions in the same order, so that their log-probabilities are bitwise equal;
    each step checks it before its update. CPU only, with `name=native` and dense models."""
    calculate_log_probs: bool = True
    """Must be true: log-probabilities captured while sampling are pi_old."""
    enable_rollout_routing_replay: bool = False
    """Record the engine's expert choices per token and layer, for `actor.router_replay=rollout`."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine by its own names, `{trtllm: {attn_backend: FLASHINFER, kv_cache_config: {dtype: fp8}}}`
    or `{vllm: {kv_cache_dtype: fp8}}`. Arguments that other keys set are refused."""
    val_kwargs: ValConfig = field(default_factory=ValConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence (prompt and response), tokens."""
        return self.max_model_len or self.prompt_length + self.response_length

    @property
    def longest_prompt(self) -> int:
        """Longest prompt of one engine call, tokens; in multi-turn episodes it contains all earlier turns."""
        return self.max_sequence_length if self.multi_turn.enable else self.prompt_length


@dataclass(frozen=True)
class OverlongConfig:
    """Overlong responses in DAPO (arXiv 2503.14476, section 3.4)."""

    buffer_length: int = 0
    """Tokens before `rollout.response_length` over which the penalty grows linearly; 0: no penalty."""
    penalty: float = 1.0
    """Penalty at full length, subtracted from the reward."""
    mask_truncated: bool = False
    """Do not train on responses cut at `rollout.response_length`."""


@dataclass(frozen=True)
class KlCtrlConfig:
    """Coefficient of a KL in the reward (verl's `kl_ctrl`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: starts at `kl_coef` and moves towards `target_kl` after each step."""
    target_kl: float = 0.1
    """Target of the mean over responses of their mean KL per token, nats, above 0."""
    horizon: int = 10000
    """Responses within which the coefficient changes by at most 20 %."""


@dataclass(frozen=True)
class EntropyCtrlConfig:
    """Coefficient of the entropy bonus (TRL's `use_adaptive_entropy`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: starts at `entropy_coef` and moves after each optimizer step; no bonus while the entropy is above its
    target."""
    target_entropy: float = 0.2
    """Target of the mean entropy over trained tokens, nats, above 0."""
    delta: float = 0.005
    """Change of the coefficient per optimizer step, above 0."""
    min_coef: float = 0.0
    """Lower bound of the coefficient."""
    max_coef: float = 1.0
    """Upper bound of the coefficient, at least `min_coef`."""


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction of samples that another policy drew than the one being trained (verl's names and meanings)."""

    preset: Optional[str] = None
    """Name of a preset of verl (`mrl/config/verl_keys/verl_presets.py`), which sets the fields below; only thresholds
    may be set in addition. null: none, except decoupled_token_is if `train.mode=async` samples from older weights and
    no field of the section is set."""
    bypass_mode: Optional[bool] = None
    """Denominator of the clipped ratio: true: the log-probabilities captured while sampling; false ("decoupled"): the
    actor's at the rollout weights, from the update or from a forward before it. null: true, or the preset's."""
    loss_type: Optional[Literal["ppo_clip", "reinforce"]] = None
    """Policy loss with `bypass_mode`: ppo_clip: the algorithm's loss, whose ratio is the weight; reinforce: -w A log pi
    with the weight w of `rollout_is`. null: ppo_clip, or the preset's."""
    rollout_is: Optional[Literal["token", "sequence"]] = None
    """Importance weight that multiplies the loss: exp(l) per token, or exp of the sum of l over the response. l: the
    actor's minus the engine's log-probability; the actor's is taken at the rollout weights, with `bypass_mode` at the
    current weights. null: no weights."""
    rollout_is_threshold: Optional[str] = None
    """2.0: weights above are clamped to it; 0.5_5.0 (IcePop): weights outside become 0. null: 2.0, or the preset's."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the step's batch, with `bypass_mode` over the minibatch."""
    rollout_rs: Optional[str] = None
    """Rejection: train only where all criteria of a comma-separated list hold: token_, seq_sum_, seq_mean_ (geometric)
    or seq_max_ with k1 (-l), k2 (l^2/2) or k3 (e^l - 1 - l); or binary_kl (KPop), the larger KL of the sampled token
    against all others."""
    rollout_rs_threshold: Optional[str] = None
    """Bound of each criterion, comma-separated, or one for all. k1: 0.5_2.0 bounds e^-l, a single number f means 1/f to
    f; others: largest accepted value. null: the preset's."""
    rollout_rs_denominator: Literal["all", "kept"] = "all"
    """Tokens in the denominator of the loss and the metrics: all: including those that `rollout_rs` rejects, so that an
    accepted token's weight does not depend on the number of rejected ones; kept: without them."""
    off_policy_mask_threshold: Optional[float] = None
    """OPSM (arXiv 2512.02556): no policy loss for a response with a negative advantage if the mean of the engine's
    minus the actor's log-probability is above this value; null: off."""

    @property
    def uses_rollout_logprobs(self) -> bool:
        """True if the log-probabilities captured while sampling enter the loss."""
        acting = self.resolved
        corrects = acting.rollout_is or acting.rollout_rs or acting.off_policy_mask_threshold is not None
        return bool(acting.bypass_mode or corrects)

    @property
    def resolved(self) -> RolloutCorrectionConfig:
        """Copy in which the preset's values and the defaults replace null; an unknown preset counts as null."""
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
    """Settings of `algorithm.policy_loss=sapo` (verl's names)."""

    tau_pos: float = 1.0
    """Temperature of the gate for advantages above 0; larger values close it faster."""
    tau_neg: float = 1.05
    """Temperature of the gate for other advantages."""


@dataclass(frozen=True)
class VespoConfig:
    """Settings of `algorithm.policy_loss=vespo` (TRL's `vespo_*`): the kernel w^k exp(lambda (1 - w))."""

    k_pos: float = 2.0
    """Exponent k for advantages of at least 0."""
    lambda_pos: float = 3.0
    """Decay lambda for advantages of at least 0."""
    k_neg: float = 3.0
    """Exponent k for advantages below 0."""
    lambda_neg: float = 2.0
    """Decay lambda for advantages below 0."""


@dataclass(frozen=True)
class DppoConfig:
    """Settings of `algorithm.policy_loss=dppo_tv` and `dppo_kl`; `clip_low` and `clip_high` bound the divergence."""

    ratio_cap: float = 20.0
    """Upper clamp of the ratio that weights the loss (verl's `clip_ratio_c`)."""


@dataclass(frozen=True)
class ClipCovConfig:
    """Settings of `algorithm.policy_loss=clip_cov` (verl's names): which tokens are dropped."""

    clip_cov_ratio: float = 2e-4
    """Fraction of the minibatch's trained tokens to drop, at least one token; drawn among those whose covariance is
    within the bounds."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance between log-probability and advantage."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance, above the lower one."""


@dataclass(frozen=True)
class KlCovConfig:
    """Settings of `algorithm.policy_loss=kl_cov` (verl's names): which tokens get a KL penalty."""

    kl_cov_ratio: float = 2e-4
    """Fraction of the minibatch's trained tokens, at least one token, with the largest covariance with the
    advantage."""
    ppo_kl_coef: float = 0.1
    """Factor of |log ratio| at these tokens."""


@dataclass(frozen=True)
class DroConfig:
    """Settings of `algorithm.policy_loss=dro` (verl's name)."""

    dro_beta: float = 1.0
    """Factor of half the squared log ratio, which keeps the policy near the one that sampled; verl has no default."""


@dataclass(frozen=True)
class DpoConfig:
    """Settings of `algorithm.name=dpo` (TRL's names)."""

    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero"] = "sigmoid"
    """Loss of a pair; sigmoid_norm and ipo divide each response's log ratio by its length."""
    beta: float = 0.1
    """Strength of the KL constraint to the reference, above 0; with ipo the paper's tau."""
    label_smoothing: float = 0.0
    """Assumed fraction of pairs with swapped labels, [0, 0.5); with robust."""
    sft_loss_weight: float = 0.0
    """Factor of the mean negative log-likelihood of the chosen responses' tokens, which is added to the loss."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and loss. null: the default of the named algorithm (`mrl/algorithms/<name>.py`)."""

    name: FilePath = "grpo"
    """File in `mrl/algorithms`, or 'package.module:Class', or 'path/to/file.py:Class'."""
    advantage_std: Optional[Literal["unbiased", "population", "none"]] = None
    """Divisor of group-relative advantages: standard deviation with n-1 (unbiased) or n (population), or none."""
    advantage_eps: Optional[float] = None
    """Added to the standard deviation (ppo, vapo: to the variance), above 0."""
    advantage_std_over: Literal["group", "batch"] = "group"
    """Rewards whose standard deviation is used: those of the prompt, or all of the step (TRL's
    `scale_rewards=batch`)."""
    credit: Literal["episode", "turn"] = "episode"
    """Rewards that count for a turn of an episode: episode: all; turn: all except those that the environment gave to
    earlier turns. With turn, the baseline is the same turn of the prompt's other samples."""
    gamma: Optional[float] = None
    """Discount of later rewards, (0, 1]; with a critic."""
    lam: Optional[float] = None
    """Lambda of generalised advantage estimation, [0, 1]; with a critic."""
    value_lam: Optional[float] = None
    """Lambda of the critic's return targets (VAPO's decoupled GAE), [0, 1]; null: `lam`."""
    lam_length_alpha: Optional[float] = None
    """VAPO's length-adaptive lambda 1 - 1 / (alpha l) for a response of l tokens, instead of `lam`; 0: off."""
    singleton_group: Optional[Literal["error", "zero", "reward"]] = None
    """Advantage of a group with a single sample: error, 0, or its raw reward. It is 0 if only one of several samples
    has a score."""
    loss_aggregation: Optional[
        Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
    ] = None
    """Aggregation of per-token losses to one number; token and sequence counts are global over the minibatch."""
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
    """Policy loss, see [objectives](objectives.md). If it is not the algorithm's default, null in clip and aggregation
    fields means the default of the loss."""
    loss_norm_length: Optional[int] = None
    """Divisor of seq_mean_token_sum_norm, tokens; null: `rollout.response_length`."""
    clip_low: Optional[float] = None
    """The ratio is clipped to >= 1 - clip_low, (0, 1]; gmpo: its logarithm to >= -clip_low; dppo: bound of the
    divergence."""
    clip_high: Optional[float] = None
    """The ratio is clipped to <= 1 + clip_high, above 0; gmpo: its logarithm to <= clip_high; dppo: bound of the
    divergence."""
    dual_clip: Optional[float] = None
    """Lower bound c > 1 of the loss for negative advantages (arXiv 1912.09729); 0: off."""
    kl_in: Literal["none", "loss", "reward"] = "none"
    """Place where the KL to the reference is added."""
    kl_coef: float = 0.001
    """Coefficient of the KL."""
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    """Estimator of http://joschu.net/blog/kl-approx.html; with +: that value with the gradient of k2, in the loss
    only."""
    kl_unbiased: bool = False
    """Multiply the KL in the loss by the ratio pi / pi_old, which corrects it for samples of an older policy."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, which is subtracted from the loss."""
    entropy_ctrl: EntropyCtrlConfig = field(default_factory=EntropyCtrlConfig)
    positive_example_nll_weight: float = 0.0
    """Factor of the mean negative log-likelihood of the correct samples' tokens, which is added to the loss."""
    top_entropy_quantile: float = 1.0
    """Fraction of the minibatch's trained tokens, those with the highest entropy, that the policy loss uses, (0, 1];
    the divisor stays the count of all trained tokens (TRL's name)."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    dynamic_sampling: Optional[bool] = None
    """Drop groups whose rewards are all equal, and sample more prompts until the batch is full."""
    max_sampling_rounds: int = 10
    """Rounds after which dynamic sampling continues with an incomplete batch."""
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
    """One reward function and its weight."""

    name: FilePath = "exact_match"
    """File in `mrl/rewards`, or 'package.module:function', or 'path/to/file.py:function'."""
    weight: float = 1.0
    """Factor in the sum; 0: only logged as `reward/<name>/mean`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    batch: Optional[Literal["group", "replica"]] = None
    """Samples per call of a batch function (TRL's, verl's): group: those of one prompt; replica: all that a replica
    sampled; null: group."""


@dataclass(frozen=True)
class RewardModelConfig:
    """Reward model: score of its head at the last token of prompt and response, in the actor's parallel layout."""

    path: Optional[FilePath] = None
    """Hugging Face folder or hub name of a sequence classifier with one label (`score.weight`), of a family that the
    actor supports; null: no reward model."""
    weight: float = 1.0
    """Factor of its score in the reward; 0: only logged as `reward/model/mean`."""
    retokenize: Optional[bool] = None
    """true: decode the text and tokenize it with the reward model's tokenizer and chat template; false: use the actor's
    token ids; null: false if both tokenizers have the same vocabulary."""


@dataclass(frozen=True)
class RewardConfig:
    """Reward of a response: weighted sum of the reward functions and the reward model's score."""

    functions: list[RewardFunctionConfig] = field(default_factory=lambda: [RewardFunctionConfig()])
    """Reward functions; a list in YAML replaces the default, and may be empty with a reward model."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    time_limit_s: float = 10.0
    """Longest time to score a sample, s; then scoring has failed. A call with several samples has a multiple of it;
    judges have their own `limit_s`."""
    num_workers: int = 1
    """Worker processes per replica, for functions that need one."""
    memory_limit_mb: int = 8192
    """Memory of a worker and its child processes, MiB; 0: no limit."""
    cache_mb: int = 64
    """Size of the score cache in the run folder, MiB per replica: workers and judges score no sample twice; 0: off."""
    error_value: Optional[float] = None
    """Reward of a sample whose scoring failed; null: no reward, so it is left out of training and of all means."""
    max_failed_frac: float = 0.5
    """Fraction of a step's samples with failed scoring above which the job stops, [0, 1]."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts and ground truth."""

    task: Optional[FilePath] = None
    """Generator in `mrl/data/synthetic_tasks.py` ("addition"), or a path to your own code; null: read files."""
    task_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the generator."""
    train_files: list[FilePath] = field(default_factory=list)
    """Training prompts: JSONL or parquet files, or data sets on the Hugging Face hub (`openai/gsm8k`, `hf://...`). Raw
    rows of the data sets that `mrl data` lists are converted."""
    val_files: list[FilePath] = field(default_factory=list)
    """Held-out prompts, named likewise; empty: no evaluation."""
    train_weights: list[float] = field(default_factory=list)
    """Share of the training prompts that come from each of `train_files`, relative to the others. Each of them has
    epochs of its own; the files of a hub data set are one. Empty: all rows once per epoch."""
    train_max_samples: Optional[int] = None
    """Number of training rows that are used, the same ones for every seed: a random choice with `shuffle`, else the
    first; null: all."""
    val_max_samples: Optional[int] = None
    """Number of held-out rows that are used, chosen likewise."""
    order_by: Optional[FilePath] = None
    """Column, such as a difficulty, by whose values each epoch is ordered, smallest first; or a path to your own code
    (`path/to/file.py:function`), called at the beginning of each epoch with the rows and their past rewards ([data of
    your own](own_data.md)). `shuffle` shuffles rows with equal values. null: no such order."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the ground truth. Rows without "answer" may have verl's "reward_model.ground_truth" instead."""
    response_key: Optional[str] = None
    """Column with the target response of supervised steps, a text or chat messages; null: the answer."""
    chosen_key: str = "chosen"
    """Column with the preferred response of `algorithm.name=dpo`, a text or chat messages. In rows without
    `prompt_key`, this and `rejected_key` contain complete conversations, whose common beginning is the prompt."""
    rejected_key: str = "rejected"
    """Column with the rejected response."""
    messages_key: str = "messages"
    """Column with a complete conversation, in rows without `prompt_key`: everything before the assistant's last turn is
    the prompt, and supervised steps train on the assistant's turns."""
    train_on_turns: Literal["all", "last"] = "all"
    """Assistant turns that supervised steps train on; all other tokens are masked. last also works with chat templates
    that render earlier turns differently once the conversation continues."""
    overlong_responses: Literal["error", "truncate_right"] = "error"
    """Treatment of supervised responses longer than `rollout.response_length`, and of conversations longer than
    `rollout.prompt_length` + `rollout.response_length`."""
    source_key: Optional[str] = None
    """Column with the name of a row's data set; null: "data_source" if the row has it, else the task, or the file's
    stem."""
    system_prompt: Optional[str] = None
    """System message for conversations that have none."""
    chat_template: Optional[FilePath] = None
    """File with a Jinja chat template; null: the tokenizer's."""
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: apply it to chat messages, not to strings."""
    split_special_tokens: bool = True
    """true: special tokens such as `<|im_end|>` inside messages of users, tools and environments are tokenized as
    ordinary text (the tokenizers' argument of this name), so only the model and the template begin and end a turn.
    false: they become control tokens, as in TRL, verl and vLLM. Prompts that are strings always keep their special
    tokens."""
    shuffle: bool = True
    """Shuffle in every epoch, seeded by `run.seed`."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """Treatment of prompts longer than `rollout.prompt_length`."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Schedule, number and format of checkpoints."""

    interval: int = 0
    """Steps between checkpoints; 0: only before the first and after the last step."""
    keep_last: int = 2
    """Newest checkpoints kept, at least 1."""
    keep_best: int = 0
    """Checkpoints with the best `best_metric` that are kept in addition."""
    best_metric: str = "val/accuracy"
    """Metric that ranks checkpoints, larger is better."""
    export_hf: bool = False
    """Also export each checkpoint as a Hugging Face folder."""
    async_save: bool = False
    """Write a checkpoint from copies in host memory while training continues; it becomes valid once it is complete."""


@dataclass(frozen=True)
class LoggerConfig:
    """Logger besides those that other keys of `observe` enable."""

    name: FilePath = ""
    """File in `mrl/observability/loggers`, or 'package.module:Name', or 'path/to/file.py:Name': a function of an
    `mrl.Opening` that returns an `mrl.Logger`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """`Opening.kwargs` of the logger."""


@dataclass(frozen=True)
class CallbackConfig:
    """Callback of the training loop."""

    name: FilePath = ""
    """'package.module:Name' or 'path/to/file.py:Name': a subclass of `mrl.Callback`, or a function that returns one."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class or function."""


@dataclass(frozen=True)
class ObserveConfig:
    """Console output, loggers, callbacks and report."""

    console: Literal["rich", "plain", "off"] = "rich"
    """Progress on the terminal; rich falls back to plain if there is no terminal."""
    num_samples: int = 4
    """Samples per evaluation that are printed and written to samples.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""
    wandb_project: Optional[str] = None
    """Weights & Biases project; null: off."""
    wandb_name: Optional[str] = None
    """Name of the W&B run; null: the name of the run folder."""
    wandb_group: Optional[str] = None
    """W&B group, such as the runs of one experiment with several seeds."""
    wandb_tags: list[str] = field(default_factory=list)
    """W&B tags."""
    loggers: list[LoggerConfig] = field(default_factory=list)
    """Further loggers."""
    callbacks: list[CallbackConfig] = field(default_factory=list)
    """Code of your own that is called after steps, evaluations and checkpoints, in this order ([mrl in
    Python](python.md))."""
    report: bool = True
    """Write report.html when the run ends."""


@dataclass(frozen=True)
class Config:
    """Complete configuration of a run."""

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
"""Training data of an algorithm: samples of the engine, responses in the data, or (chosen, rejected) pairs."""

ORDER_BY = "data.order_by"
"""Field that names a column or user code."""

OWN_CODE = (
    "rollout.name",
    "rollout.agent.environment",
    "algorithm.name",
    "reward.functions[*].name",
    "data.task",
    ORDER_BY,
    "observe.loggers[*].name",
    "observe.callbacks[*].name",
)
"""Fields that may name user code outside mrl."""

PARAMETERS = {
    "rollout.agent.environment": "environments=[...]",
    "algorithm.name": "algorithm=...",
    "reward.functions": "rewards=[...]",
    "observe.loggers": "loggers=[...]",
    "observe.callbacks": "callbacks=[...]",
}
"""Key of user code -> parameter of `mrl.train` that takes Python objects for it."""


def orders_by_rewards(data: DataConfig) -> bool:
    """Returns whether `data.order_by` is a path to user code and not a column."""
    return is_code_not_column(data.order_by or "")


def code_names(config: Config) -> dict[str, list[str]]:
    """Returns the names at each key of OWN_CODE; a column at `data.order_by` is none."""
    found: dict[str, list[str]] = {}
    for key in OWN_CODE:
        above, _, last = key.partition("[*].")
        value = attrgetter(above)(config)
        found[key] = [getattr(entry, last) for entry in value] if last else [value] if value else []
    if not orders_by_rewards(config.data):
        found[ORDER_BY] = []
    return found


def load(source: str | Path | Mapping[str, Any], overrides: str | Sequence[str] = ()) -> Config:
    """Returns the config of a YAML file, or of nested dicts, with overrides applied in order.

    - A name without a file, such as `quickstart`, is that of a config that comes with mrl (`mrl configs`).
    - `section.key=value` sets a field; `reward.functions[0].weight=2` sets a field of a list entry.
    - A list is replaced (`data.val_files=[a.jsonl,b.jsonl]`); `data.val_files=a.jsonl` is a list of one.
    - A mapping is merged (`data.task_kwargs={max_value: 9}`); `data.task_kwargs={}` empties it.
    - `~section.key` resets a field or a section to its default; `~data.task_kwargs.max_value` removes an entry.
    - Rank, alpha, use_rslora and modules of `actor.lora` and `critic.lora` that are not set are those of the folder in
      `adapter_path`.
    - A path to user code is searched in the config's folder, then in the working folder, and becomes absolute.

    Raises:
        UserError: The file is missing or not YAML, keys are unknown (the message suggests the nearest ones), values
            have the wrong type, or a file of user code does not exist. One error lists all wrong keys and values.
    """
    values = Values(Config)
    folders = [Path()]
    if isinstance(source, Mapping):
        where, raw = "in the mapping", dict(source)
    elif isinstance(source, (str, Path)):
        source = find_config(os.fspath(source))
        where, raw = f"in '{source}'", _read(source)
        folders.insert(0, Path(source).parent)
    else:
        raise UserError(f"{shown(source)} is not a config. Pass the path of a YAML file, or a dict of sections.")
    _refuse_callables(raw, where)
    mistakes = Mistakes()
    with mistakes.collected():
        values.update(raw, where)
    for item in [overrides] if isinstance(overrides, str) else overrides:
        with mistakes.collected():
            values.override(item)
    mistakes.check()
    values.locate(OWN_CODE, folders, columns=(ORDER_BY,))
    for section in ("actor.lora", "critic.lora"):
        values.take_adapter_settings(section)
    config: Config = values.made(f"{where} or an override")
    return config


def _refuse_callables(value: Any, where: str, key: str = "") -> None:
    """Raises UserError for a function or class in nested dicts and lists, because a config contains only names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_callables(inner, where, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse_callables(inner, where, f"{key}[{index}]")
    elif callable(value):
        named = getattr(value, "__name__", type(value).__name__)
        parameter = next((use for above, use in PARAMETERS.items() if key.startswith(above)), None)
        advice = "" if parameter is None else f"Pass it as mrl.train(config, {parameter}), or name it as "
        raise UserError(
            f"config key '{key}' {where}: got the Python object {named}, expected a name. "
            f"{advice or 'Name it as '}'path/to/file.py:{named}'."
        )


def to_yaml(config: Config) -> str:
    """Returns every field of the config as YAML; `load` reads it back to an equal config."""
    dumper = get_omega_conf_dumper()  # four times faster than OmegaConf.to_yaml, which first creates nodes
    text = yaml.dump(asdict(config), Dumper=dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return str(text)


def _read(path: str | Path) -> Any:
    if not os.path.isfile(path):
        why = "is a folder" if os.path.isdir(path) else "does not exist"
        raise UserError(
            f"config file '{path}' {why}.{did_you_mean_config(path)} Pass the path of a YAML file, or the "
            "name of a config that comes with mrl, such as quickstart; `mrl configs` lists them."
        )
    return read_yaml(Path(path), "config file")
