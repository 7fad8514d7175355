"""What vLLM does with each field of `rollout`, and what it refuses.

Owns the table in `mrl/docs/vllm.md`, which is made from `TABLE` (`python -m mrl.engines.vllm.fields`), and the refusals
that need no vLLM to know. `preflight/` asks for these before anything starts. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mrl.config import RolloutConfig

NAME = "vllm"
LEAST_TEMPERATURE = 0.01
"""vLLM takes it for any that is smaller."""

TABLE = {
    "name": "this engine",
    "engine_dir": "refused: vLLM has no built engine",
    "n": "each sample is a request of its own",
    "temperature": "`SamplingParams.temperature`; refused between 0 and 0.01, where vLLM takes 0.01",
    "top_k": "`SamplingParams.top_k`; -1 becomes 0",
    "top_p": "`SamplingParams.top_p`; refused below 1 with `min_p` above 0, which vLLM applies first",
    "min_p": "`SamplingParams.min_p`",
    "do_sample": "false: `temperature=0`, whose log-probabilities vLLM scores without temperature and truncation",
    "ignore_eos": "true: no `stop_token_ids`",
    "stop": "looked for after each step; the response ends with the string",
    "repetition_penalty": "must be 1, as everywhere",
    "prompt_length": "longer prompts are refused",
    "response_length": "`SamplingParams.max_tokens`",
    "max_model_len": "`max_model_len`; null: `prompt_length + response_length`",
    "dtype": "`dtype`; null: `model.dtype`",
    "quantization": "refused: vLLM would pack what a refit writes into",
    "tensor_model_parallel_size": "`tensor_parallel_size`, by any launcher",
    "pipeline_model_parallel_size": "refused above 1",
    "expert_parallel_size": "1, or as many as ranks in a replica: `enable_expert_parallel`; on a CPU refused above 1",
    "moe_tensor_parallel_size": "follows from the other two; refused where it does not",
    "max_num_seqs": "`max_num_seqs`",
    "max_num_batched_tokens": "`max_num_batched_tokens`",
    "enable_chunked_prefill": "`enable_chunked_prefill`",
    "enable_prefix_caching": "`enable_prefix_caching`; the cache is dropped at every refit",
    "gpu_memory_utilization": "of the memory that is free when the engine starts, less its weights: "
    "`kv_cache_memory_bytes`, never more than `max_num_seqs` of the longest sequences take",
    "free_cache_engine": "true: KV cache and weights leave a GPU between rollouts, the weights into pinned host memory "
    "(`sleep(level=1)`); on a CPU vLLM frees nothing",
    "enforce_eager": "`enforce_eager`; always on a CPU",
    "calculate_log_probs": "must be true, as everywhere",
    "enable_rollout_routing_replay": "refused: vLLM 0.32 returns experts only from a runner that mrl does not run",
    "engine_kwargs": "`vllm`: arguments of `LLM` by their own names; those that other keys decide are refused",
    "val_kwargs": "sampling parameters of evaluations",
    "checkpoint_engine": "size of the transport's buckets",
}
"""Each field of `RolloutConfig`, in its order."""

Refusal = tuple[str, Callable[[RolloutConfig], bool], str]

REFUSALS: tuple[Refusal, ...] = (
    (
        "pipeline_model_parallel_size",
        lambda r: r.pipeline_model_parallel_size != 1,
        "raise rollout.tensor_model_parallel_size instead",
    ),
    (
        "quantization",
        lambda r: r.quantization is not None,
        "vLLM would pack what a refit writes into; leave it out, or use rollout.name=native",
    ),
    (
        "expert_parallel_size",
        lambda r: r.expert_parallel_size not in (1, r.tensor_model_parallel_size),
        "vLLM either cuts every expert over the ranks of a replica (1) or spreads whole ones over all of them "
        "(rollout.tensor_model_parallel_size)",
    ),
    (
        "moe_tensor_parallel_size",
        lambda r: r.moe_tensor_parallel_size not in (None, r.tensor_model_parallel_size // r.expert_parallel_size),
        "it follows from rollout.tensor_model_parallel_size and rollout.expert_parallel_size; leave it out",
    ),
    (
        "enable_rollout_routing_replay",
        lambda r: r.enable_rollout_routing_replay,
        "vLLM 0.32 returns experts only from a model runner that mrl does not run; set it to false, and "
        "actor.router_replay=recompute, which replays the actor's own choice with any engine; or use "
        "rollout.name=native",
    ),
    (
        "do_sample",
        lambda r: not r.do_sample and (r.temperature != 1.0 or r.top_k != -1 or r.top_p != 1.0 or r.min_p != 0.0),
        "greedy responses are scored by vLLM without temperature and truncation; set rollout.temperature=1, top_k=-1, "
        "top_p=1 and min_p=0",
    ),
)
"""(field, whether it is refused, why and what to do)."""


def refusals(rollout: RolloutConfig) -> Iterator[str]:
    """One message for each field that vLLM refuses; none for another engine."""
    if rollout.name != NAME:
        return
    for field, refused, why in REFUSALS:
        if refused(rollout):
            yield f"rollout.{field}={getattr(rollout, field)} is refused with rollout.name={NAME}: {why}."
    for section, given in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        if 0.0 < given.temperature < LEAST_TEMPERATURE:
            yield (
                f"{section}.temperature={given.temperature} is refused with rollout.name={NAME}: vLLM would sample at "
                f"{LEAST_TEMPERATURE}. Raise it to that, or set {section}.do_sample=false."
            )
        if given.min_p > 0.0 and given.top_p < 1.0:
            yield (
                f"{section}.min_p={given.min_p} with {section}.top_p={given.top_p} is refused with rollout.name="
                f"{NAME}: vLLM drops tokens by min_p first, mrl by top_p. Set one of them to keep all, or use "
                "rollout.name=native."
            )


def refusals_on_a_cpu(rollout: RolloutConfig) -> Iterator[str]:
    """A message for what vLLM cannot do without GPUs; none for another engine."""
    if rollout.name == NAME and rollout.expert_parallel_size > 1:
        yield (
            f"rollout.expert_parallel_size={rollout.expert_parallel_size} with rollout.name={NAME} on a CPU: vLLM 0.32 "
            "crashes there. Set it to 1: the ranks then cut each expert."
        )


def markdown() -> str:
    """The table of the documentation."""
    rows = ["| `rollout.` | `vllm` |", "|---|---|"]
    rows += [f"| `{field}` | {use} |" for field, use in TABLE.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())  # noqa: T201 -- it is what the command is for
