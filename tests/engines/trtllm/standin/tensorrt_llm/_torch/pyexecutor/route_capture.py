"""The experts of a request's tokens, as `_torch/route_capture.py` of the main branch keeps and returns them.

It fails at the start under a pipeline, speculation, and kernels that choose experts themselves. A row is there for each
position that went through the model: the last token's only where the overlap scheduler ran a step too many. A prefix
that came from the cache has -1 where its experts were evicted. A request that was paused would go on counting where it
stood, so that the rows behind belong to other tokens: nothing may pause.
"""

import torch

from tensorrt_llm.faults import StandInError, fault

SEPARATED = ("CUTLASS", "DEEPGEMM")


def create(args):
    if not _is_on(args):
        return
    if args.pipeline_parallel_size > 1 or args.speculative_config is not None:
        raise RuntimeError("[R3] enable_return_routed_experts is not supported with pipeline parallelism")
    backend = "TRTLLM" if args.moe_config is None else args.moe_config.backend
    if backend not in SEPARATED:
        raise RuntimeError(f"[R3] router_replay requires separated routing, but {backend} uses fused routing")
    if args.scheduler_config.capacity_scheduler_policy.name != "GUARANTEED_NO_EVICT":
        raise StandInError("the routes of a paused request stand at other positions than its tokens")


def outputs(args, params, routed, *, one_more):
    """`additional_generation_outputs` of a finished request."""
    if not (_is_on(args) and params.return_routed_experts) or fault("no_routes"):
        return None
    rows = routed.to(torch.int16)
    rows[: int(fault("lost_routes") or 0)] = -1
    rows[-1] = rows[-2]  # whatever the step too many chose
    rows = rows if one_more else rows[:-1]
    return {"routed_experts": [rows[: len(rows) - int(fault("short_routes") or 0)]]}


def _is_on(args):
    return getattr(args, "enable_return_routed_experts", False)
