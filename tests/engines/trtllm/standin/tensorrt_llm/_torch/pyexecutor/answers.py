"""From requests to completions: tokens by the native engine, everything else as the sampler and the storage have it."""

from collections import defaultdict

import torch

from mrl.engines.base import SamplingConfig
from tensorrt_llm._torch.pyexecutor import llm_request, route_capture
from tensorrt_llm._torch.pyexecutor.sampler import scored
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.faults import fault


def of(batch, native, sampler, args, arch):
    """(result, completion or exception) of each request that was not taken back."""
    overlap = not args.disable_overlap_scheduler
    llm_request.pin([result.request.sampling_params for result in batch], arch.vocab_size, overlap)
    groups = defaultdict(list)
    for result in batch:
        if result.aborted:
            continue
        refused = _refuse(result.request, args)
        if refused:
            yield result, ValueError(refused)
        else:
            groups[_sampling(result.request.sampling_params)].append(result)
    for sampling, results in groups.items():
        prompts = [result.request.prompt_token_ids for result in results]
        found = native.generate(prompts, sampler.keys(results), sampler.heard(sampling))
        for result, (tokens, logits), routed in zip(results, found, native.routed, strict=True):
            params = result.request.sampling_params
            completion = _completion(params, sampling, sampler, tokens, logits, overlap=overlap)
            more = overlap and len(tokens) < params.max_tokens
            completion.additional_generation_outputs = route_capture.outputs(args, params, routed, one_more=more)
            yield result, completion


def _refuse(request, args):
    length, params = len(request.prompt_token_ids), request.sampling_params
    if length > args.max_input_len or length + params.max_tokens > args.max_seq_len:
        return f"prompt of {length} tokens and {params.max_tokens} more exceed max_seq_len={args.max_seq_len}"
    if length > args.max_num_tokens and not args.enable_chunked_prefill:
        return f"prompt of {length} tokens exceeds max_num_tokens={args.max_num_tokens}"
    return ""


def _sampling(params):
    """What the native engine is asked for."""
    return SamplingConfig(
        n=1,
        max_tokens=params.max_tokens,
        temperature=params.temperature or 1.0,
        top_k=-1 if not params.top_k or params.is_greedy else params.top_k,
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        greedy=params.is_greedy,
        stop_token_ids=tuple(params.stop_token_ids or ()),
    )


def _completion(params, sampling, sampler, tokens, logits_TV, *, overlap):
    ended = tokens[-1] in sampling.stop_token_ids
    logprobs = []
    if params.logprobs:
        rows = torch.log_softmax(scored(sampler, params, sampling, logits_TV), 1)
        logprobs = [sampler.entry(token, row) for token, row in zip(tokens, rows, strict=True)]
    logits = None
    if params.return_generation_logits and not fault("no_logits"):
        logits = llm_request.returned(logits_TV, ended_early=len(tokens) < params.max_tokens, overlap=overlap)
    if ended and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    return CompletionOutput(
        index=0,
        token_ids=list(tokens),
        logprobs=logprobs,
        finish_reason="stop" if ended else "length",
        generation_logits=logits,
    )
