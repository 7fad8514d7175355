"""Effect of each field of `rollout` in the native engine, and its refusals. Imports no torch."""

from __future__ import annotations

from mrl.engines._field_support import ENGINE_DIR, Fields, FieldSupport, Refusal, refused

FIELDS: Fields = {
    "engine_dir": ENGINE_DIR,
    "n": FieldSupport("each sample is a row of the batch"),
    "temperature": FieldSupport("divides the logits"),
    "top_k": FieldSupport("keeps the k most likely tokens"),
    "top_p": FieldSupport("of these, keeps the most likely ones with total probability p"),
    "min_p": FieldSupport("of these, drops tokens below this fraction of the largest probability"),
    "do_sample": FieldSupport("false: the most likely token, scored under the same temperature and truncation"),
    "ignore_eos": FieldSupport("true: neither end tokens nor stop strings end a response"),
    "stop": FieldSupport("checked after each token; the response ends with the token that completes the string"),
    "prompt_length": FieldSupport("with `response_length`, the longest sequence"),
    "response_length": FieldSupport("a response ends there"),
    "max_model_len": FieldSupport("longer sequences are refused; null: `prompt_length + response_length`"),
    "dtype": FieldSupport("dtype of weights and KV cache; null: `model.dtype`"),
    "quantization": FieldSupport("`fp8`, `fp8_per_tensor`: linear layers are stored in FP8, and multiplied in `dtype`"),
    "tensor_model_parallel_size": FieldSupport("ranks of a replica, with any launcher"),
    "over_sample_rate": FieldSupport(
        "sampling pauses between two tokens; partial rollouts are prefilled with the next weights"
    ),
    "over_age": FieldSupport("what happens to a prompt that would exceed the staleness bound"),
    "mask_offpolicy": FieldSupport("true: only the tokens that a response's newest weights sampled are trained"),
    "pipeline_model_parallel_size": refused(
        "only built TensorRT-LLM engines support pipeline parallelism",
        lambda r: r.pipeline_model_parallel_size != 1,
        "Raise rollout.tensor_model_parallel_size instead, or use rollout.name=trtllm_engine.",
    ),
    "expert_parallel_size": FieldSupport(
        "ranks over which experts are distributed; the rest of the replica shards each"
    ),
    "moe_tensor_parallel_size": FieldSupport("must be replica size / `expert_parallel_size`"),
    "max_num_seqs": FieldSupport("rows that decode at a time, if the KV cache has room for them"),
    "max_num_batched_tokens": FieldSupport("prompt tokens per forward; also limits the decoding rows"),
    "enable_chunked_prefill": FieldSupport(
        "true: a prompt is cut every `max_num_batched_tokens` tokens; its log-probabilities depend on no other prompt"
    ),
    "enable_prefix_caching": FieldSupport("true: a prompt is prefilled once for its samples; no cache between calls"),
    "gpu_memory_utilization": FieldSupport(
        "fraction of the free memory at start, less later model memory, for the KV cache"
    ),
    "free_cache_engine": FieldSupport("true: the KV cache is freed between rollouts, and the weights before an update"),
    "enforce_eager": FieldSupport("true: no CUDA graphs; on a CPU only PyTorch's operators, nothing is compiled"),
    "true_on_policy": FieldSupport("true: uses the functions of the actor, each row in a fixed order, on a CPU"),
    "enable_rollout_routing_replay": FieldSupport("true: the experts of each token are recorded"),
    "engine_kwargs": refused("nothing would read it"),
    "multi_turn.enable": FieldSupport("true: multi-turn episodes; one that waits for a reply does not block others"),
    "speculative.method": FieldSupport(
        "`ngram`: drafts from earlier tokens of the prompt's samples, on a CPU with compiled operations; tokens and "
        "log-probabilities stay the same. Elsewhere it has no effect, and the log says so",
        refuses=(
            Refusal(
                "with replicas of more than 2 ranks",
                "with more than 2 ranks gloo's order of summation depends on the number of tokens in a step",
                lambda r: r.speculative.method is not None and r.tensor_model_parallel_size > 2,
                "Lower rollout.tensor_model_parallel_size, or remove it.",
            ),
        ),
    ),
    "speculative.num_speculative_tokens": FieldSupport(
        "most tokens per sequence and step; fewer if more would not pay"
    ),
    "speculative.prompt_lookup_max": FieldSupport("longest n-gram to search"),
    "speculative.prompt_lookup_min": FieldSupport("shortest n-gram to search"),
    "checkpoint_engine.canary": FieldSupport("true: syncs weights twice at start and compares responses; null: no"),
}
