"""Feeds for tests, and what becomes of samples in calls that are stopped and continued."""

import torch

from mrl.engines._work_queue import PromptWork, WorkQueue
from mrl.engines.base import SamplingConfig
from tests.engines.native.tiny import make_prompts

SAME_WEIGHTS_ATOL = 1e-5
"""Keys and values that were read together or one by one differ by roundings of fp32."""

LENGTHS = (3, 9, 20, 9, 5)
PROMPTS = make_prompts(LENGTHS)
SAMPLING = SamplingConfig(n=3, max_tokens=14, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
CUT = {"top_p": 0.9, "top_k": 30}
NARROW = {"max_num_seqs": 6, "max_num_batched_tokens": 16}
ALL = [(prompt, sample) for prompt in PROMPTS for sample in range(SAMPLING.n)]


class Parts(WorkQueue):
    """Hands out one part of the work at each pulse, and says stop at the `last`, or once all is whole."""

    def __init__(self, parts, last=None, most=15):
        self.parts, self.last, self.max_samples = list(parts), last, most
        self.num_pulses, self.num_asked, self.whole, self.waiting = 0, 0, [], []

    def poll(self, finished, num_waiting):
        self.whole += finished
        self.waiting.append(num_waiting)
        self.num_pulses += 1
        if self.num_pulses == self.last or (not self.parts and len(self.whole) == self.num_asked):
            return None
        part = self.parts.pop(0) if self.parts else []
        self.num_asked += sum(work.num_samples for work in part)
        return part


def key_of(one):
    return one.prompt.uid, one.sample_index


def work_of(samples, begun=(), prompts=PROMPTS):
    """Of each prompt the samples that begin and those that go on."""
    new, old = {}, {}
    for prompt, sample in samples:
        new.setdefault(prompt.uid, []).append(sample)
    for one in begun:
        old.setdefault(one.prompt.uid, []).append(one)
    return [
        PromptWork(p, tuple(new.get(p.uid, ())), tuple(old.get(p.uid, ()))) for p in prompts if p.uid in {**new, **old}
    ]


def not_begun(*found, samples=ALL):
    seen = {key_of(one) for part in found for one in part}
    return [(prompt, sample) for prompt, sample in samples if (prompt.uid, sample) not in seen]


def undisturbed(engine, sampling=SAMPLING):
    return engine.generate(PROMPTS, sampling)


def disturbed(engine, sampling=SAMPLING, last=3, between=lambda num_calls: None, prompts=PROMPTS):
    """Whole responses of calls that stop at their `last` pulse, and what each left; `between` is told how many were."""
    whole, begun, left = [], [], []
    samples = [(prompt, sample) for prompt in prompts for sample in range(SAMPLING.n)]
    while begun or not_begun(whole, samples=samples):
        feed = Parts([work_of(not_begun(whole, begun, samples=samples), begun, prompts)], last)
        begun = engine.generate_streaming(feed, sampling)
        assert begun == sorted(begun, key=key_of)
        whole += feed.whole
        left.append(begun)
        between(len(left))
    return whole, left


def assert_same(found, expected, atol=SAME_WEIGHTS_ATOL):
    """Each sample once; its floats to `atol`."""
    others = {key_of(one): one for one in expected}
    assert sorted(map(key_of, found)) == sorted(others)
    for one in found:
        other = others[key_of(one)]
        for name in ("prompt", "response_ids", "finish_reason"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("rollout_logprobs", "log_kept_mass"):
            mine, its = (torch.tensor(getattr(each, name)) for each in (one, other))
            torch.testing.assert_close(mine, its, atol=atol, rtol=0)
        assert told(one.kept_tokens) == told(other.kept_tokens)


def told(support):
    return support and (support.ids_K.tolist(), support.counts_R.tolist())


def exact(one):
    """All of a whole or begun response, comparable bit for bit."""
    return (
        *key_of(one), tuple(one.response_ids), tuple(one.rollout_logprobs), one.version_runs, told(one.kept_tokens),
        tuple(one.log_kept_mass),
    )  # fmt: skip
