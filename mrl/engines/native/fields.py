"""What mrl's own engine does with each field of `rollout`, and what it refuses. It imports no torch."""

from __future__ import annotations

from mrl.engines._config_support import ENGINE_DIR, Fields, Refusal, Use, refused

FIELDS: Fields = {
    "engine_dir": ENGINE_DIR,
    "n": Use("each sample is a row of the batch"),
    "temperature": Use("divides the logits"),
    "top_k": Use("keeps the k most likely tokens"),
    "top_p": Use("of these, keeps the most likely ones that make up p"),
    "min_p": Use("of these, drops tokens below this part of the most likely one's probability"),
    "do_sample": Use("false: the most likely token, scored under the same temperature and truncation"),
    "ignore_eos": Use("true: neither end tokens nor stop strings end a response"),
    "stop": Use("looked for after each token; the response ends with the token that completes the string"),
    "prompt_length": Use("with `response_length`, the longest sequence"),
    "response_length": Use("a response ends there"),
    "max_model_len": Use("longer sequences are refused; null: `prompt_length + response_length`"),
    "dtype": Use("of weights and KV cache; null: `model.dtype`"),
    "quantization": Use("`fp8`, `fp8_per_tensor`: linear layers are stored in FP8, and multiplied in `dtype`"),
    "tensor_model_parallel_size": Use("ranks of a replica, by any launcher"),
    "over_sample_rate": Use("sampling stops between two tokens; what is begun is read again under the next weights"),
    "over_age": Use("what happens to a prompt that would become too old"),
    "mask_offpolicy": Use("true: of a response, only what its last weights sampled is trained"),
    "pipeline_model_parallel_size": refused(
        "only built TensorRT-LLM engines have a pipeline",
        lambda r: r.pipeline_model_parallel_size != 1,
        "Raise rollout.tensor_model_parallel_size instead, or use rollout.name=trtllm_engine.",
    ),
    "expert_parallel_size": Use("ranks over which a layer's experts are spread; the rest of the replica cuts each"),
    "moe_tensor_parallel_size": Use("must be what `expert_parallel_size` leaves of the replica"),
    "max_num_seqs": Use("rows that decode at a time, where the KV cache has room for them"),
    "max_num_batched_tokens": Use("prompt tokens of a forward; no more rows than that"),
    "enable_chunked_prefill": Use(
        "true: a prompt is cut each `max_num_batched_tokens` tokens; its log-probabilities depend on no other prompt"
    ),
    "enable_prefix_caching": Use("true: a prompt is read once for its samples; nothing outlives a call"),
    "gpu_memory_utilization": Use("part of what is free at start, less what the model takes later, for the KV cache"),
    "free_cache_engine": Use("true: the KV cache is freed between rollouts, the weights too before an update"),
    "enforce_eager": Use("true: no CUDA graphs; on a CPU PyTorch's operators between products, nothing is compiled"),
    "true_on_policy": Use("true: computes by the functions of the actor, each row in one order, on a CPU"),
    "enable_rollout_routing_replay": Use("true: the experts of each token are kept"),
    "engine_kwargs": refused("nothing would read it"),
    "multi_turn.enable": Use("true: episodes; one that waits holds up no other, and keeps its cache"),
    "speculative.method": Use(
        "`ngram`: drafted from what the samples of a prompt have said, on a CPU with compiled operations; no token and "
        "no log-probability changes. Elsewhere nothing is drafted, and the log says so",
        refuses=(
            Refusal(
                "with replicas of more than 2 ranks",
                "gloo adds what more than 2 ranks computed in an order that depends on the number of tokens in a step",
                lambda r: r.speculative.method is not None and r.tensor_model_parallel_size > 2,
                "Lower rollout.tensor_model_parallel_size, or leave it out.",
            ),
        ),
    ),
    "speculative.num_speculative_tokens": Use("most for a sequence in a step; fewer where more would not pay"),
    "speculative.prompt_lookup_max": Use("longest end of a sequence that is looked for"),
    "speculative.prompt_lookup_min": Use("shortest"),
    "checkpoint_engine.canary": Use("true: refits twice at start and compares answers; null: no"),
}
