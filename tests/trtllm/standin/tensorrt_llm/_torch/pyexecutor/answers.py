"""From requests to completions: tokens by the native engine, log-probabilities as the flavour's sampler has them."""

from collections import defaultdict
from dataclasses import replace

import torch

from mrl.engines.base import SamplingConfig
from mrl.functional.sampling import keep_threshold
from tensorrt_llm.executor.result import CompletionOutput, Logprob
from tensorrt_llm.faults import fault


def of(batch, native, args, arch):
    """(result, completion or exception) of each request that was not taken back."""
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
        keys = [result.request.sampling_params.seed or 0 for result in results]
        under = replace(sampling, min_p=0.0) if fault("min_p_ignored") else sampling
        found = native.generate([result.request.prompt_token_ids for result in results], keys, under)
        for result, (tokens, logits) in zip(results, found, strict=True):
            yield result, _completion(result.request.sampling_params, sampling, args, tokens, logits)


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


def _completion(params, sampling, args, tokens, logits_TV):
    ended = tokens[-1] in sampling.stop_token_ids
    logprobs = []
    if params.logprobs:
        scored = torch.log_softmax(_scored(params, sampling, args, logits_TV), 1)
        for token, row in zip(tokens, scored, strict=True):
            best = int(row.argmax())
            entry = {best: Logprob(logprob=float(row[best]), rank=1)}
            if not fault("top1"):
                entry[token] = Logprob(logprob=float(row[token]), rank=int((row > row[token]).sum()) + 1)
            logprobs.append(entry)
    if ended and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    returned = None if fault("no_logits") or not params.return_generation_logits else logits_TV
    return CompletionOutput(
        index=0,
        token_ids=list(tokens),
        logprobs=logprobs,
        finish_reason="stop" if ended else "length",
        generation_logits=returned,
    )


def _scored(params, sampling, args, logits_TV):
    mode = fault("scores")
    if mode is None:
        asked = getattr(params, "logprobs_mode", None)
        mode = "processed" if getattr(asked, "name", "") == "PROCESSED" else "raw"
        mode = "tempered" if args.sampler_type == "TRTLLMSampler" else mode
    if mode == "raw":
        return logits_TV
    tempered = logits_TV / sampling.temperature
    threshold = keep_threshold(tempered, 1 if sampling.greedy else sampling.top_k, sampling.top_p, sampling.min_p)
    if mode == "tempered" or threshold is None:
        return tempered
    return tempered.masked_fill(tempered < threshold[:, None], -torch.inf)
