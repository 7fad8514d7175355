"""The stand-in itself: what the real package would not take, or would take and then be wrong, raises."""

import pytest
import torch

from mrl.trainer.hf_export import write_model_folder
from tests.engines.trtllm import stubs, tiny
from tests.engines.trtllm.signature import SignatureError


@pytest.fixture
def make(standin, tmp_path):
    """Starts the stand-in without mrl's adapter."""
    from tensorrt_llm import LLM

    write_model_folder(tmp_path, tiny.ARCH, "float32", tiny.TOKENIZER)
    standin.setenv("TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL", "1")
    standin.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    started = []

    def start(**given):
        settings = {"dtype": "float32", "max_input_len": 8, "max_seq_len": 16, "skip_tokenizer_init": True, **given}
        started.append(LLM(str(tmp_path), **settings))
        return started[-1]

    yield start
    for llm in started:
        llm.shutdown()


def test_arguments_that_the_real_one_does_not_have(make, standin):
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.faults import StandInError
    from tensorrt_llm.llmapi import KvCacheConfig

    llm = make()
    cases = (
        (ValueError, "invalid argument: colour", lambda: make(colour=1)),
        (SignatureError, "max_seq_len='8' is str, expected int", lambda: make(max_seq_len="8")),
        (SignatureError, "enable_chunked_prefill=1 is int, expected bool", lambda: make(enable_chunked_prefill=1)),
        (SignatureError, "no field 'sleep_config'", lambda: KvCacheConfig(sleep_config=1)),
        (SignatureError, "no field 'logprobs_mode'", lambda: SamplingParams(logprobs_mode="x")),
        (ValueError, "require top_k >= 0", lambda: SamplingParams(top_k=-1)),
        (SignatureError, "unexpected keyword argument 'max_tokens'", lambda: llm.generate_async([1], max_tokens=1)),
        (StandInError, "would start MPI workers", lambda: make(tensor_parallel_size=2)),
    )
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    standin.setenv("RANK", "0")
    with pytest.raises(StandInError, match="RANK"):
        make()
    standin.delenv("RANK")
    standin.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    with pytest.raises(StandInError, match="another process"):
        make()


class Steps:
    """The executor of a started stand-in, step by step."""

    def __init__(self, llm):
        self.executor = llm._executor.engine
        self.model = self.executor.model_engine.model
        self.tensors = tiny.weights()

    def load(self, tensors, **given):
        self.executor.model_engine.model_loader.reload(self.model, tensors, **given)

    def ask(self, llm):
        from tensorrt_llm import SamplingParams

        params = SamplingParams(end_id=-1, pad_id=0, temperature=1.0, max_tokens=2)
        return llm.generate_async({"prompt_token_ids": [1, 2]}, params).result(timeout=5)


def test_a_refit_out_of_order_raises(make):
    from tensorrt_llm.faults import StandInError

    llm = make()
    steps = Steps(llm)
    model, tensors, executor = steps.model, steps.tensors, steps.executor
    some = dict(list(tensors.items())[:3])
    cases = (
        ("weights that are 'loaded'", lambda: steps.ask(llm)),  # nothing was ever loaded
        ("pre_reload_weights comes first", lambda: steps.load(tensors, allow_partial_loading=True)),
        ("process_weights_after_loading after 'loaded'", model.process_weights_after_loading),
        ("post_load_weights after 'loaded'", model.post_load_weights),
        ("under a running event loop", executor.reset_prefix_cache),
    )
    for message, call in cases:
        with pytest.raises(StandInError, match=message):
            call()
    with executor.control_action():
        model.pre_reload_weights()
        wrong = (
            ("without allow_partial_loading", lambda: steps.load(some)),
            ("no tensor of this model", lambda: steps.load({"x": torch.zeros(1)}, allow_partial_loading=True)),
        )
        for message, call in wrong:
            with pytest.raises(StandInError, match=message):
                call()
        steps.load(some, allow_partial_loading=True)
        with pytest.raises(StandInError, match="was loaded before"):
            steps.load(some, allow_partial_loading=True)
        with pytest.raises(StandInError, match="tensors were not loaded"):
            model.process_weights_after_loading()
        rest = {name: tensor for name, tensor in tensors.items() if name not in some}
        steps.load(rest, allow_partial_loading=True)
    with pytest.raises(StandInError, match="'loading'"):
        steps.ask(llm)  # the finalize is missing
    with executor.control_action():
        model.process_weights_after_loading()
        model.post_load_weights()
    with pytest.raises(StandInError, match="prefixes of old weights"):
        steps.ask(llm)
    with executor.control_action():
        executor.reset_prefix_cache()
    assert len(steps.ask(llm).outputs[0].token_ids) == 2


def test_a_buffer_that_changes_before_it_was_read_raises(make):
    from tensorrt_llm.faults import StandInError

    steps = Steps(make())
    steps.model.pre_reload_weights()
    name, tensor = next(iter(steps.tensors.items()))
    steps.load({name: tensor}, allow_partial_loading=True)
    tensor.add_(1)
    with pytest.raises(StandInError, match=f"the buffer of {name} changed"):
        steps.load({}, allow_partial_loading=True)


def test_memory_wakes_in_order_and_by_known_tags(make):
    from tensorrt_llm._torch import virtual_memory
    from tensorrt_llm.faults import StandInError

    executor = make(enable_sleep=True)._executor.engine
    with pytest.raises(StandInError, match="running event loop"):
        virtual_memory.release_with_tag("kv_cache")
    with executor.control_action():
        cases = (
            (ValueError, "'weights' is no tag", lambda: virtual_memory.release_with_tag("weights")),
            (ValueError, "no tag that may", lambda: virtual_memory.release_with_tag("_no_capture_init_kv_cache")),
            (StandInError, "is not released", lambda: virtual_memory.materialize_with_tag("kv_cache")),
        )
        for kind, message, call in cases:
            with pytest.raises(kind, match=message):
                call()
        virtual_memory.release_with_tag("model", "kv_cache")
        with pytest.raises(StandInError, match="released already"):
            virtual_memory.release_with_tag("kv_cache")
        with pytest.raises(StandInError, match="wakes before the weights"):
            virtual_memory.materialize_with_tag("kv_cache")
        virtual_memory.materialize_with_tag("model", "kv_cache")
    executor = make()._executor.engine
    with executor.control_action(), pytest.raises(ValueError, match="not enabled"):
        virtual_memory.release_with_tag("kv_cache")


def test_stubs_are_those_of_the_signatures():
    written = {path: (stubs.FOLDER / path).read_text(encoding="utf-8") for path in stubs.stub_files()}
    assert written == stubs.stub_files()
    there = {path.relative_to(stubs.FOLDER).as_posix() for path in stubs.FOLDER.rglob("*.pyi")}
    assert there == set(written)
