"""Layouts that the ranks or the model cannot make up are refused, with the ranks that would do."""

from dataclasses import replace

import pytest

from mrl.trainer.validation.validate import check
from tests.trainer.validation.runs import ARCH, PP, ROLLOUT_TP, TP, make, refusal

VPP = "parallel.virtual_pipeline_model_parallel_size"

RULES = [
    # overrides, ranks, what the message says
    ([f"{TP}=2"], 1, f"{TP}=2 does not divide the 1 rank"),
    ([f"{TP}=2"], 1, "torchrun --nproc-per-node 2 -m mrl ... (launch/torchrun.sh); or only check the config: mrl"),
    ([f"{TP}=2", f"{ROLLOUT_TP}=4"], 1, f"--world-size 4; or use one process: {TP}=1 {ROLLOUT_TP}=1"),
    ([f"{TP}=3"], 1, f"{TP}=3 does not divide the model's attention heads (4)"),
    ([f"{ROLLOUT_TP}=3"], 1, f"{ROLLOUT_TP}=3 does not divide the model's attention heads (4)"),
    ([f"{ROLLOUT_TP}=2"], 1, f"--world-size 2; or use one process: {ROLLOUT_TP}=1"),
    ([f"{TP}=2", "parallel.sequence_parallel=true"], 1, f"one process: {TP}=1 parallel.sequence_parallel=false"),
    ([f"{TP}=2", f"{PP}=2"], 6, "= 4 does not divide the 6 rank"),
    ([f"{TP}=3"], 3, f"{TP}=3 does not divide the model's attention heads (4)"),
    ([f"{ROLLOUT_TP}=3"], 3, f"{ROLLOUT_TP}=3 does not divide the model's attention heads (4)"),
    ([f"{ROLLOUT_TP}=2"], 3, f"{ROLLOUT_TP}=2 does not divide the 3 rank"),
    ([f"{PP}=3"], 3, f"{PP}=3 does not divide the model's 4 layers"),
    ([f"{PP}=2", f"{VPP}=4"], 2, "x virtual_pipeline_model_parallel_size=4 does not divide the model's 4 layers"),
    ([f"{VPP}=2"], 1, f"{VPP}=2 needs {PP} above 1"),
    (["parallel.sequence_parallel=true"], 1, f"parallel.sequence_parallel=true needs {TP} above 1"),
    (["parallel.context_parallel_size=2"], 3, "parallel.context_parallel_size=2 does not divide the 3 rank(s)"),
    (["rollout.num_ranks=2"], 2, "rollout.num_ranks=2 leaves none of this job's 2 rank(s) to train"),
    (["rollout.nnodes=1"], 4, "rollout.nnodes=1 x rollout.n_gpus_per_node=8 leaves none of this job's 4"),
    (["rollout.num_ranks=2"], 2, "Start 3 ranks, 2 of them for rollouts, or more in steps of 1: torchrun "),
    (["rollout.num_ranks=2"], 2, "or use one process: rollout.num_ranks=0"),
    ([f"{TP}=2", "rollout.num_ranks=1"], 4, f"{TP}=2 does not divide the 3 rank(s) of this job's 4 that train"),
    ([f"{ROLLOUT_TP}=2", "rollout.num_ranks=1"], 3, "does not divide the 1 rank(s) of this job that sample"),
    (["rollout.num_ranks=1", "rollout.nnodes=1"], 16, "both set the number of ranks that only sample"),
    (["rollout.n_gpus_per_node=4"], 1, "would have no effect because rollout.nnodes is 0"),
    (["rollout.pipeline_model_parallel_size=2"], 2, "only built TensorRT-LLM engines support pipeline parallelism"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)


def test_key_value_heads_split_or_are_copied():
    check(make(f"{TP}=4"), ARCH, world_size=4, tokenizer_vocab_size=12)
    three = replace(ARCH, num_heads=12, num_kv_heads=3)
    assert "3 key/value heads: one must be a multiple" in refusal(make(f"{TP}=2"), 2, three)
