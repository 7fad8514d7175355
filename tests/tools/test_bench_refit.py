"""The benchmark times real refits into each engine, and the parts of them."""

import argparse
import importlib
import sys

import pytest
import torch

from tests.ranks import run_ranks
from tests.source import ROOT

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 128, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def measured(engine, tp=1):
    sys.path.insert(0, str(ROOT / "tools"))
    tool = importlib.import_module("bench_refit")
    args = argparse.Namespace(
        engine=engine, preset="qwen3_30b_a3b", num_layers=2, overrides=SMALL, dtype="float32", bucket_megabytes=1,
        repeats=2, tp=tp, pp=1, ep=1, etp=None, rollout_tp=1, rollout_ep=1,
    )  # fmt: skip
    return tool.run_case(args, torch.device("cpu"))


def check_parts(engine):
    (found,) = run_ranks(1, measured, engine)
    assert found["engine"] == engine and found["bytes_moved"] == found["lower_bound_bytes"] == 0
    whole, packing = (found[name]["median"] for name in ("refit_s", "finish_s"))
    assert 0 < packing < whole
    assert found["ratio"] < found["ratio_transport"] and found["ratio_cpu"] > 0
    assert found["ratio_sockets"] is None, "one rank sends nothing"


def test_a_weight_sync_is_timed_in_all_and_in_parts():
    check_parts("native")


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_ranks")
def test_a_weight_sync_into_vllm_is_timed_in_all_and_in_parts():
    check_parts("vllm")


def test_what_ranks_send_each_other_is_compared_with_the_sockets_alone():
    for found in run_ranks(2, measured, "native", 2):
        assert found["bytes_moved"] == found["lower_bound_bytes"] > 0
        assert found["ratio_sockets"] > 0
        assert found["sockets_s"]["median"] > 0
