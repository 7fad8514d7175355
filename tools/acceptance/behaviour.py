"""Checks of an engine's behaviour: long pauses, end tokens, seeds."""

from __future__ import annotations

import time
from dataclasses import replace

from acceptance.fixture import Bench
from acceptance.result import CheckError, Facts, NotHereError
from mrl.engines.trtllm import inspection

PATIENCE_S, NUM_PAUSES = 2.0, 4
"""Timeout of the hang detector during the check, seconds; number of consecutive weight syncs."""

END_TOKENS, NUM_SAMPLES = 16, 4


def pause(bench: Bench) -> Facts:
    """Pauses several times in a row, then pauses and idles longer than the hang detector's timeout."""
    trainer = bench.trainer
    with inspection.short_hang_timeout(trainer.rollout_worker.engine, PATIENCE_S) as watched:
        if not watched:
            raise NotHereError("only the LLM API's event loop has a hang detector, since 1.2")
        for _ in range(NUM_PAUSES):
            bench.refit()
            bench.greedy_responses()  # wakes and sleeps
        with inspection.paused(trainer.rollout_worker.engine):
            time.sleep(2 * PATIENCE_S)
        bench.greedy_responses()
        time.sleep(2 * PATIENCE_S)  # as while the actor trains
        bench.greedy_responses()
    return {"held and idle, s": 2 * PATIENCE_S, "refits": NUM_PAUSES}


def ends(bench: Bench) -> Facts:
    """Checks that an end token that is certain to be sampled ends its response and stays part of it."""
    trainer = bench.trainer
    bench.refit()
    (prompt,) = trainer.state.source.next(1)
    straight = replace(
        trainer.rollout_worker.train_sampling,
        n=1,
        greedy=True,
        ignore_eos=True,
        stop=(),
        max_tokens=min(END_TOKENS, trainer.rollout_worker.train_sampling.max_tokens),
    )
    (whole,) = bench.generate([prompt], straight)
    tokens = whole.response_ids
    at = next((index for index in range(1, len(tokens)) if tokens[index] not in tokens[:index]), 0)
    (cut,) = bench.generate([prompt], replace(straight, ignore_eos=False, stop_token_ids=(tokens[at],)))
    facts: Facts = {"tokens": len(tokens), "the end token is the one at": at, "it ended after": len(cut.response_ids)}
    if cut.response_ids != tokens[: at + 1] or cut.finish_reason != "stop":
        raise CheckError(
            f"with the end token {tokens[at]} {tokens} became {cut.response_ids} ({cut.finish_reason})", facts
        )
    return facts


def seeds(bench: Bench) -> Facts:
    """Records whether a sample depends on its own seed only (mrl does not need it); fails if all are equal."""
    bench.refit()
    (prompt,) = bench.trainer.state.source.next(1)
    setting = replace(bench.trainer.rollout_worker.train_sampling, n=NUM_SAMPLES, stop=())
    first, again = (
        [each.response_ids for each in bench.generate([prompt], replace(setting, n=count))[:1]]
        for count in (NUM_SAMPLES, 1)
    )
    several = {tuple(each.response_ids) for each in bench.generate([prompt], setting)}
    facts: Facts = {"the same sample alone and among others": first == again, "different samples": len(several)}
    if len(several) == 1:
        raise CheckError(f"{NUM_SAMPLES} samples of one prompt are all the same", facts)
    return facts
