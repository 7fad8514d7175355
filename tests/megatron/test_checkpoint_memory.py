"""A commit gathers nothing: a rank holds its own part, and later commits plan nothing anew."""

import ctypes
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mrl.megatron import checkpoint
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, make_policy, train
from tests.megatron.test_checkpoint import RATE
from tests.ranks import run_ranks

STAGING = 8 << 20
"""Bytes that a save needs beside copies of what the rank writes: metadata, buffers of files, what malloc keeps."""
RANKS = 8


WIDE = replace(ARCHS["qwen2"], hidden_size=256, intermediate_size=4096)


def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def growth(folder):
    """Peaks of a save above what was there, bytes of this rank's files, and the optimizer's own part.

    The peaks are of one that the caller waits for, and of one beside it.
    """
    policy = make_policy(WIDE, ParallelLayout(RANKS), dtype="bfloat16")
    policy.start_optimizer(RATE)
    train(policy, 1)
    saver, grown = checkpoint.Saver(policy), []
    saver.begin(folder / "first").finish()
    for name, beside in (("second", False), ("third", True)):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not used again unseen
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        saver.begin(folder / name, async_save=beside).finish()
        grown.append(memory("VmHWM") - before)
    written = sum(file.stat().st_size for file in (folder / "second").glob(f"__{dist.get_rank()}_*.distcp"))
    groups = (group for part in policy.optimizer.chained_optimizers for group in part.optimizer.param_groups)
    own = sum(parameter.numel() for group in groups for parameter in group["params"])
    return grown, written, 12 * own


@pytest.mark.slow
def test_a_rank_holds_no_more_than_its_own_part(tmp_path):
    for grown, written, own in run_ranks(RANKS, growth, tmp_path):
        assert own > 2 * STAGING, "the part is too small to be seen"
        assert written < 1.5 * own  # fp32 master weights and moments, and some of the bf16 weights
        assert max(grown) <= written + STAGING


def several(folder):
    """Sizes of what is exchanged as objects at each of five saves, and the last one's tensors loaded again."""
    policy = make_policy(ARCHS["qwen2"], ParallelLayout(2, pp=2))
    policy.start_optimizer(RATE)
    saver, sent, gathered = checkpoint.Saver(policy), [], dist.all_gather_object
    try:
        for index in range(5):
            train(policy, 1, first=index)
            sent.append(0)

            def count(found, value, group=None):
                gathered(found, value, group=group)
                sent[-1] += len(found)

            dist.all_gather_object = count
            saver.begin(folder / str(index)).finish()
            dist.all_gather_object = gathered
    finally:
        dist.all_gather_object = gathered
    weights = {name: tensor.clone() for name, tensor in policy.named_tensors().items()}
    metrics = train(policy, 1, first=5)
    again = make_policy(ARCHS["qwen2"], ParallelLayout(2, pp=2), seed=None)
    again.start_optimizer(RATE)
    checkpoint.load(folder / "4", again)
    same = all(torch.equal(tensor, weights[name]) for name, tensor in again.named_tensors().items())
    return sent, same, train(again, 1, first=5) == metrics


def test_later_saves_gather_no_metadata_and_are_whole(tmp_path):
    for sent, same, goes_on in run_ranks(2, several, tmp_path):
        assert sent[0] > 0 and sent[1:] == [0, 0, 0, 0]
        assert same and goes_on
