"""What a test wants to go wrong: words of MRL_STANDIN_FAULTS, separated by spaces.

reload=NAME            reload raises at this tensor
die=N, die_on_rank1=N  the event loop raises in its N-th batch
hang=S                 seconds until the hang detector fires, 300 without it
slow_exit=S            ranks but the first take so many seconds to leave a pause
silent                 requests are never answered
no_logits              no logits are returned
top1                   log-probabilities of the most likely token only, not of the sampled one
devices=N              each rank sees N devices
reads_more             o_proj reads the rows of the next rank, and tells that it reads its own
no_parts               modules do not tell which part of a tensor they read
whole_only             load_weights has no allow_partial_loading
scores=raw|tempered|processed    what log-probabilities score; default: as the sampler has it, and as asked in 1.3
min_p_ignored          TRTLLMSampler samples without min_p
no_min_p               1.3's TorchSampler does not know min_p
graphs_stale           FP8 weights are stored anew after each refit, as 1.3 did it on Blackwell for a while
engine_fails=R         a built engine's rank R of a replica raises in generate
decoder=raw|shifted    a built engine's log-probabilities are of raw logits, or stand one position on
lost_routes=N          the experts of the first N tokens were evicted from the cache of shared prefixes
short_routes=N         the experts of the last N tokens that were read are missing
no_routes              no experts come back
warm_logits            a built engine returns logits over the temperature
"""

import os

VARIABLE = "MRL_STANDIN_FAULTS"


class StandInError(RuntimeError):
    """The real package would fail here, or compute something wrong."""


def fault(name):
    """The value of a fault, True where it has none, or None."""
    for word in os.environ.get(VARIABLE, "").split():
        key, _, value = word.partition("=")
        if key == name:
            return value or True
    return None
