"""The engine of built engines on one rank, behind the stand-in: what the native engine samples, and what it refuses."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from mrl.algorithms.functional.sampling import stream_key
from mrl.config.config import RolloutConfig
from mrl.engines.base import SamplingConfig
from mrl.engines.native.engine import NativeEngine
from mrl.engines.trtllm.engine_dir import read_engine_folder
from mrl.engines.trtllm.logprob_probe import Scores
from mrl.engines.trtllm.replica import Replica
from mrl.engines.trtllm.runner import Runner
from mrl.engines.trtllm.trt_engine import BuiltEngine
from mrl.errors import UserError
from mrl.resharding.regions import full_region
from mrl.resharding.trtllm import TrtllmMapping
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt
from tests.checkpoint.formats.trtllm_cases import ARCHS, weights
from tests.engines.specs import spec_of
from tests.engines.trtllm.conftest import FAULTS
from tests.engines.trtllm.engines import build_engines
from tests.engines.trtllm.tiny import trains_with
from tests.resharding.archs import filled

ARCH = ARCHS["qwen2"]
CLOSE = 1e-4  # nats: prefill in another order, fp32
SHARPNESS = 0.3  # of the random weights: distributions with one to ten likely tokens
PROMPTS = [Prompt(3, (1, 2, 3), "", source="rows:3"), Prompt(9, (5,), "")]
ENDS = tuple(range(0, 100, 7))
PLAIN = SamplingConfig(n=3, max_tokens=6, stop_token_ids=ENDS, seed=5)


def decode(ids):
    return "".join(chr(ord("a") + token % 26) for token in ids)


def fill(engine, version=7, arch=ARCH):
    hf = {name: tensor * SHARPNESS for name, tensor in weights(arch, seed=3).items()}
    engine.begin_update()
    engine.update_weights(
        [WeightSlice(name, full_region(t.shape), t) for name, t in filled(engine.layout(), hf).items()]
    )
    engine.finish_update(version)


@pytest.fixture
def made(standin, tmp_path):
    """Makes an engine that holds the weights of `fill`."""
    numbers = count()

    def make(*, refitted=True, trained=True, **config):
        folder = build_engines(tmp_path / str(next(numbers)), ARCH, TrtllmMapping())
        given = {"prompt_length": 8, "response_length": 8, "gpu_memory_utilization": 0.02, "max_num_seqs": 5} | config
        config = RolloutConfig(name="trtllm_engine", engine_dir=str(folder), **given)
        engine = BuiltEngine(spec_of(config, ARCH, decode=decode, trains_on_logprobs=trained))
        if refitted:
            fill(engine)
        return engine

    return make


@pytest.fixture(scope="module")
def native():
    config = RolloutConfig(prompt_length=8, response_length=8, gpu_memory_utilization=0.02, max_num_seqs=5)
    engine = NativeEngine(spec_of(config, ARCH, decode=decode))
    fill(engine)
    return engine


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.prompt.uid, ours.sample_index, ours.response_ids, ours.finish_reason, ours.policy_version) == (
            theirs.prompt.uid, theirs.sample_index, theirs.response_ids, theirs.finish_reason, theirs.policy_version
        )  # fmt: skip
        assert ours.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=CLOSE)


SETTINGS = {
    # what is asked, whether the logits of every step are needed
    "plain": (PLAIN, False),
    "temperature": (replace(PLAIN, temperature=0.6), False),
    "no end": (replace(PLAIN, ignore_eos=True), False),
    "greedy": (replace(PLAIN, n=1, greedy=True, temperature=0.8), False),
    "top_k": (replace(PLAIN, top_k=4), True),
    "top_p and min_p": (replace(PLAIN, top_p=0.7, min_p=0.2, temperature=1.3), True),
    "strings": (replace(PLAIN, stop=("a", "xyz", "e"), stop_token_ids=()), False),
}


@pytest.mark.parametrize(("sampling", "by_logits"), SETTINGS.values(), ids=SETTINGS)
def test_it_samples_and_scores_as_the_native_engine(made, native, sampling, by_logits):
    engine = made(**trains_with(sampling))
    expected = native.generate(PROMPTS, sampling)
    assert_same(engine.generate(PROMPTS, sampling), expected)
    assert {rollout.finish_reason for rollout in expected} >= ({"stop"} if sampling.stop else set())
    stats = engine.stats()
    assert (stats["by_logits"], stats["batches"]) == (by_logits, -(-2 * sampling.n // 5))
    engine.close()


def test_the_runtime_is_asked_for_what_the_fields_say(made, standin):
    sampling = replace(PLAIN, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop_token_ids=(8, 2))
    engine = made(**trains_with(sampling))
    engine.generate(PROMPTS, sampling)  # with the probe
    from tensorrt_llm.runtime import ModelRunner

    asked, generate = [], ModelRunner.generate
    standin.setattr(ModelRunner, "generate", lambda self, **given: (asked.append(given), generate(self, **given))[1])
    engine.generate(PROMPTS, sampling)
    engine.generate(PROMPTS, replace(PLAIN, greedy=True, ignore_eos=True, n=1))
    settings = [given["sampling_config"] for given in asked]
    first, last = settings[0], settings[-1]
    assert [len(given["batch_input_ids"]) for given in asked] == [5, 1, 2]  # rollout.max_num_seqs, n
    assert (first.temperature, first.top_k, first.top_p, first.min_p, first.max_new_tokens) == (0.7, 5, 0.9, 0.1, 6)
    assert first.stop_words_list.tolist() == [[[8, 2], [1, 2]]] * 5
    assert first.end_id == first.pad_id == -42 and first.output_log_probs and first.return_dict
    assert first.random_seed.tolist()[1:4] == [stream_key(5, 3, 1), stream_key(5, 3, 2), stream_key(5, 9, 0)]
    assert (last.top_k, last.top_p, last.stop_words_list) == (1, 1.0, None)
    assert [given["output_generation_logits"] for given in asked] == [True, True, False]


def test_a_mixture_of_experts_too(standin, tmp_path):
    arch, sampling = ARCHS["qwen2_moe"], replace(PLAIN, temperature=0.9)
    folder = build_engines(tmp_path, arch, TrtllmMapping())
    given = {"prompt_length": 8, "response_length": 8, "gpu_memory_utilization": 0.02}
    built = BuiltEngine(spec_of(RolloutConfig(engine_dir=str(folder), **given), arch, decode=decode))
    plain = NativeEngine(spec_of(RolloutConfig(**given), arch, decode=decode))
    for engine in (built, plain):
        fill(engine, arch=arch)
    assert_same(built.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling))


@pytest.mark.parametrize("fault", ["decoder=raw", "decoder=shifted"])
def test_a_decoder_that_scores_something_else_is_not_believed(made, native, standin, fault):
    standin.setenv(FAULTS, fault)
    sampling = replace(PLAIN, temperature=0.6)
    engine = made(**trains_with(sampling))
    assert_same(engine.generate(PROMPTS, sampling), native.generate(PROMPTS, sampling))
    assert engine.stats()["by_logits"] == 1.0
    assert engine._verdict.scores is (Scores.RAW if fault == "decoder=raw" else Scores.UNKNOWN)


def test_logits_that_are_not_the_models_are_refused_unless_only_metrics_read_them(made, standin):
    standin.setenv(FAULTS, "warm_logits")
    with pytest.raises(UserError, match="logits change with the temperature"):
        made().generate(PROMPTS, PLAIN)
    assert len(made(trained=False).generate(PROMPTS, PLAIN)) == 6


def test_it_generates_only_awake_and_whole(made):
    engine = made(refitted=False)
    with pytest.raises(RuntimeError, match="weight update incomplete"):
        engine.generate(PROMPTS, PLAIN)
    fill(engine)
    engine.generate(PROMPTS, PLAIN)
    session = engine._runner._runner.session
    assert session.buffer is not None
    engine.sleep()
    assert session.buffer is None and not session.buffer_allocated
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.generate(PROMPTS, PLAIN)
    engine.wake()
    engine.generate(PROMPTS, PLAIN)
    engine.begin_update()
    with pytest.raises(RuntimeError, match="weight update incomplete"):
        engine.generate(PROMPTS, PLAIN)


def test_what_does_not_fit_is_refused(made):
    engine = made(max_num_batched_tokens=8)
    long = Prompt(1, (1,) * 9, "", source="rows:1")
    with pytest.raises(UserError, match="prompt rows:1 has 9 tokens"):
        engine.generate([long], PLAIN)
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        engine.generate([replace(long, prompt_ids=(999,))], PLAIN)
    engine._budget = 10
    with pytest.raises(UserError, match="the KV cache of one sequence takes .* leaves 10"):
        engine.generate(PROMPTS, PLAIN)


def test_rows_are_as_many_as_tokens_and_memory_allow(made, native):
    engine = made(max_num_batched_tokens=6, max_num_seqs=64)
    assert_same(engine.generate(PROMPTS, PLAIN), native.generate(PROMPTS, PLAIN))
    assert engine.stats()["batches"] == 2  # 3 + 3 and 3 + 1 + 1 + 1 prompt tokens
    engine = made(max_num_seqs=64)
    engine._budget = 2 * engine._row_bytes(3 + 6, 0)
    engine.generate(PROMPTS, PLAIN)
    assert engine.stats()["batches"] == 3


def test_a_response_without_its_end_is_an_error(made, standin):
    engine = made()
    engine.generate(PROMPTS, PLAIN)
    from tensorrt_llm.runtime import ModelRunner

    returned = ModelRunner._returned

    def cut(self, output_ids, *rest):
        output_ids[0, 0, 4:] = -42
        return returned(self, output_ids, *rest)

    standin.setattr(ModelRunner, "_returned", cut)
    with pytest.raises(RuntimeError, match="response 0 to prompt rows:3 ended without an end token"):
        engine.generate(PROMPTS, replace(PLAIN, ignore_eos=True))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.3.0rc21", "1.3 removed the TensorRT backend"),
        ("0.21.0", "this is 0.21.0"),
        ("1.1.0", "this is 1.1.0"),
        ("1.2.0", "were built by Tensor"),
    ],
)
def test_other_versions_are_refused(made, standin, version, said):
    import tensorrt_llm

    folder = made(refitted=False).spec.config.engine_dir
    standin.setattr(tensorrt_llm, "__version__", version)
    with pytest.raises(UserError, match=said):
        Runner(read_engine_folder(folder), replica=Replica(None), device=torch.device("cpu"))


def test_without_tensorrt_llm_it_says_what_is_needed(made, standin):
    folder = made(refitted=False).spec.config.engine_dir
    standin.setitem(__import__("sys").modules, "tensorrt_llm", None)
    with pytest.raises(UserError, match="needs TensorRT-LLM >= 1.2, < 1.3, which is not installed"):
        Runner(read_engine_folder(folder), replica=Replica(None), device=torch.device("cpu"))
