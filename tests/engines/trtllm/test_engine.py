"""The LLM API's engine on the stand-in: the native engine's samples, the order of calls, and what a failure leaves."""

import os
import time
from dataclasses import replace

import pytest
import torch

from mrl.errors import UserError
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import FAULTS
from tests.engines.trtllm.tiny import PROMPTS, SAMPLING

LOGPROB_TOLERANCE = 1e-5
"""fp32 log-probabilities of one forward over the sequence against token by token."""


@pytest.fixture(scope="module")
def weights():
    return tiny.weights()


def assert_same(found, expected):
    assert [r.response_ids for r in found] == [r.response_ids for r in expected]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in expected]
    assert [(r.prompt.uid, r.sample_index) for r in found] == [(r.prompt.uid, r.sample_index) for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=LOGPROB_TOLERANCE)


def test_samples_are_those_of_the_native_engine_through_sleep_and_refit(flavour, tmp_path, weights):
    with tiny.engine(tmp_path) as engine:
        expected = tiny.native(weights).generate(PROMPTS, SAMPLING)
        assert {rollout.finish_reason for rollout in expected} == {"stop", "length"}
        tiny.refit(engine, weights, version=4)
        assert engine.policy_version == 4
        assert_same(engine.generate(PROMPTS, SAMPLING), expected)
        engine.sleep()
        with pytest.raises(RuntimeError, match="sleeps"):
            engine.generate(PROMPTS, SAMPLING)
        engine.wake()
        assert_same(engine.generate(PROMPTS, SAMPLING), expected)  # dynamic sampling has no refit in between
        engine.sleep()
        tiny.refit(engine, weights, version=5)  # wakes the weights only
        with pytest.raises(RuntimeError, match="sleeps"):
            engine.generate(PROMPTS, SAMPLING)
        engine.wake()
        assert_same(engine.generate(PROMPTS, SAMPLING), expected)
        assert engine.generate(PROMPTS, SAMPLING)[0].policy_version == 5
        assert engine.stats() == {"prefill_tokens": 27.0, "decode_tokens": float(sum(map(_length, expected)))}


def test_weights_given_back_before_an_update_wait_for_a_refit_where_they_are_discarded(flavour, tmp_path, weights):
    discards = flavour == "1.3"
    with tiny.engine(tmp_path) as engine:
        from tensorrt_llm._torch import virtual_memory

        engine.sleep()
        engine.release()  # at the start
        tiny.refit(engine, weights, version=1)
        engine.wake()
        expected = engine.generate(PROMPTS, SAMPLING)
        engine.sleep()
        assert ("model_weights" in virtual_memory.released) is False
        assert ("model" in virtual_memory.released) and "kv_cache" in virtual_memory.released
        for _ in range(2):  # the second has no effect
            engine.release()
            assert ("model_weights" in virtual_memory.released) == discards
        assert engine.policy_version == (-1 if discards else 1)
        engine.wake()
        if discards:
            with pytest.raises(RuntimeError, match="weight update incomplete: call begin_update"):
                engine.generate(PROMPTS, SAMPLING)
        else:
            assert_same(engine.generate(PROMPTS, SAMPLING), expected)
        engine.sleep()
        tiny.refit(engine, weights, version=2)
        engine.wake()
        assert_same(engine.generate(PROMPTS, SAMPLING), expected)


def _length(rollout):
    return len(rollout.response_ids)


@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_a_sample_is_its_seeds_own_and_hears_min_p(flavour, tmp_path, weights, min_p):
    sampling = replace(SAMPLING, min_p=min_p, ignore_eos=True)  # and all logits are there
    with tiny.engine(tmp_path, min_p=min_p) as engine:
        tiny.refit(engine, weights)
        assert_same(engine.generate(PROMPTS, sampling), tiny.native(weights).generate(PROMPTS, sampling))


def test_stop_strings_cut_a_response_as_in_the_native_engine(standin, tmp_path, weights):
    sampling = replace(SAMPLING, stop=("9", "12"))
    expected = tiny.native(weights).generate(PROMPTS, sampling)
    assert any(r.finish_reason == "stop" and r.response_ids[-1] != 13 for r in expected)
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        assert_same(engine.generate(PROMPTS, sampling), expected)


def test_one_request_for_all_tensors_where_parts_cannot_be_loaded(standin, tmp_path, weights):
    standin.setenv(FAULTS, "whole_only")
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        assert engine._runtime.executor.model_engine.model.buckets == [list(weights)]
        assert len(engine.generate(PROMPTS, SAMPLING)) == 9


def test_a_refit_that_fails_names_bucket_and_tensor_and_the_engine_stays_shut(flavour, monkeypatch, tmp_path, weights):
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        name = list(weights)[-1]
        monkeypatch.setenv(FAULTS, f"reload={name}")
        with pytest.raises(RuntimeError, match=f"bucket 1 of the weight sync, .*shape mismatch in {name}"):
            tiny.refit(engine, weights, version=1)
        monkeypatch.delenv(FAULTS)
        with pytest.raises(RuntimeError, match="weight update incomplete: TensorRT-LLM rejected bucket 1"):
            engine.generate(PROMPTS, SAMPLING)
        with pytest.raises(RuntimeError, match="rejected bucket 1"):  # TensorRT-LLM has no way back
            tiny.refit(engine, weights, version=1)
        assert engine.policy_version == 0


def test_a_refit_that_ends_early_leaves_a_shut_engine(standin, tmp_path, weights):
    with tiny.engine(tmp_path) as engine:
        some = dict(list(weights.items())[:-2])
        with pytest.raises(RuntimeError, match=f"2 tensors were not received; the first is '{list(weights)[-2]}'"):
            tiny.refit(engine, some)
        with pytest.raises(RuntimeError, match="weight update incomplete: 2 tensors were not received"):
            engine.generate(PROMPTS, SAMPLING)


def test_regions_are_held_against_the_model(standin, tmp_path, weights):
    with tiny.engine(tmp_path) as engine:
        name, tensor = next(iter(weights.items()))
        item = WeightSlice(name, full_region(tensor.shape), tensor)
        with pytest.raises(RuntimeError, match="begin_update first"):
            engine.update_weights([item])
        engine.begin_update()
        for wrong, message in (
            (WeightSlice("lm_head.bias", ((0, 1),), torch.zeros(1)), "'lm_head.bias' is not a tensor"),
            (WeightSlice(name, item.region, tensor.double()), "float64"),
        ):
            with pytest.raises(RuntimeError, match=message):
                engine.update_weights([wrong])
        engine.update_weights([item])
        with pytest.raises(RuntimeError, match=f"'{name}' was complete"):
            engine.update_weights([item])


@pytest.mark.parametrize("faults, message", [("die=2", "illegal memory access"), ("silent", "did not respond in 1 s")])
def test_an_engine_that_dies_or_hangs_ends_the_call_with_its_cause(standin, tmp_path, weights, faults, message):
    standin.setattr("threading.excepthook", lambda args: None)
    with tiny.engine(tmp_path, timeout_s=1.0) as engine:
        tiny.refit(engine, weights)
        standin.setenv(FAULTS, faults)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=message):
            engine.generate(PROMPTS, SAMPLING)
        if faults == "die=2":  # what would wait for a loop that is gone fails too
            with pytest.raises(RuntimeError, match="event loop has ended: .*illegal memory access"):
                tiny.refit(engine, weights)
        assert time.monotonic() - began < 10


def test_told_to_stop_it_takes_its_requests_back(standin, tmp_path, weights):
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        standin.setenv(FAULTS, "silent")
        engine.abort_requested = lambda: True
        assert engine.generate(PROMPTS, SAMPLING) == []


def test_prompts_that_do_not_fit_are_named(standin, tmp_path, weights):
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        for ids, message in (
            ((), "no tokens"),
            ((1,) * 9, "has 9 tokens; the engine's limit is 8"),
            ((999,), "vocabulary"),
        ):
            with pytest.raises(UserError, match=f"prompt 7 .*{message}"):
                engine.generate([Prompt(uid=7, prompt_ids=ids, text="")], SAMPLING)


def test_the_start_hides_the_trainers_variables_and_puts_them_back(standin, tmp_path):
    hidden = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x", "TLLM_DISABLE_MPI": "1", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    for name, value in hidden.items():
        standin.setenv(name, value)
    before = dict(os.environ)
    with tiny.engine(tmp_path):  # the stand-in refuses them
        assert dict(os.environ) == before


def test_without_tensorrt_llm_the_message_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(UserError, match="needs TensorRT-LLM 1.2 or 1.3, .*rollout.name=native"), tiny.engine(tmp_path):
        pass


def test_an_executor_in_another_process_is_refused(standin, tmp_path):
    from tensorrt_llm.executor.executor import GenerationExecutor

    class Proxy:
        def shutdown(self):
            pass

    standin.setattr(GenerationExecutor, "create", staticmethod(lambda *args, **kwargs: Proxy()))
    with pytest.raises(RuntimeError, match=r"in another process \(Proxy\)"), tiny.engine(tmp_path):
        pass
