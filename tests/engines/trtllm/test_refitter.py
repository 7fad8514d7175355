"""Every weight of a built engine is accounted for, and every answer of TensorRT is read."""

import pytest
import torch

from mrl.engines.trtllm.refitter import EngineWeights
from mrl.errors import UserError
from mrl.resharding.regions import full_region
from mrl.resharding.trtllm import HEAD, TrtllmMapping, trtllm_layout
from mrl.resharding.weight_slice import WeightSlice
from tests.checkpoint.formats.trtllm_cases import ARCHS, weights
from tests.resharding.archs import filled

CPU = torch.device("cpu")


def engine_of(arch, mapping=TrtllmMapping(), rank=0):  # noqa: B008 -- frozen
    """The stand-in's engine with other weights than the tests bring."""
    import tensorrt
    from tensorrt_llm.builder import packed

    layout = trtllm_layout(arch, mapping, rank, "float32")
    return tensorrt.ICudaEngine(packed({k: v * 0 for k, v in filled(layout, weights(arch)).items()}), True), layout


def brought(layout, arch):
    return filled(layout, weights(arch, seed=1))


def refit(held, tensors):
    held.begin()
    held.write([WeightSlice(name, full_region(tensor.shape), tensor) for name, tensor in tensors.items()])
    held.commit()


@pytest.mark.parametrize("name", ["qwen2", "llama tied", "qwen2_moe", "mixtral"])
def test_the_engine_has_what_was_brought_and_constants_stay(standin, name):
    from tensorrt_llm.builder import packed

    engine, layout = engine_of(ARCHS[name])
    held = EngineWeights(engine, layout, CPU, "the engine")
    tensors = brought(layout, ARCHS[name])
    for _ in range(2):
        refit(held, tensors)
    assert engine.refits == 2
    assert any(key.endswith("fused_fc.weight") for key in engine.weights) == (ARCHS[name].moe is None)
    expected = packed(tensors)
    assert engine.weights.keys() == expected.keys()
    assert all(torch.equal(engine.weights[key].view(expected[key].shape), expected[key]) for key in expected)


def test_a_shared_head_is_not_brought(standin):
    engine, layout = engine_of(ARCHS["llama tied"])
    del engine.weights[HEAD]
    held = EngineWeights(engine, layout, CPU, "the engine")
    assert HEAD not in held.layout and len(held.layout) == len(layout) - 1
    engine, layout = engine_of(ARCHS["qwen2"])
    del engine.weights[HEAD]
    with pytest.raises(UserError, match=f"the engine lacks weights of the model: 1; the first is '{HEAD}'"):
        EngineWeights(engine, layout, CPU, "the engine")


NORM = "transformer.layers.1.input_layernorm.weight"


def test_other_weights_than_the_models_are_named(standin):
    engine, layout = engine_of(ARCHS["qwen2"])
    missing = {k: v for k, v in engine.weights.items() if k != NORM}
    engine.weights, whole_engine = missing, engine.weights
    with pytest.raises(UserError, match=f"lacks weights of the model: 1; the first is '{NORM}'"):
        EngineWeights(engine, layout, CPU, "the engine")
    engine.weights = whole_engine | {"transformer.layers.0.lora.weight": torch.zeros(2)}
    with pytest.raises(
        UserError, match="has weights that the model lacks: 1; the first is 'transformer.layers.0.lora.weight'"
    ):
        EngineWeights(engine, layout, CPU, "the engine")
    engine.weights = whole_engine | {NORM: whole_engine[NORM].bfloat16()}
    with pytest.raises(
        UserError, match=f"'{NORM}' of the engine has 16 elements of .*BF16.*; the model has 16 of .*FLOAT"
    ):
        EngineWeights(engine, layout, CPU, "the engine")
    engine.weights, engine.refittable = whole_engine, False
    with pytest.raises(UserError, match="cannot be refitted"):
        EngineWeights(engine, layout, CPU, "the engine")


def test_what_tensorrt_refuses_is_an_error_that_names_it(standin, monkeypatch):
    import tensorrt

    engine, layout = engine_of(ARCHS["qwen2"])
    held = EngineWeights(engine, layout, CPU, "the engine")
    tensors = brought(layout, ARCHS["qwen2"])
    accepted = tensorrt.Refitter.set_named_weights
    with monkeypatch.context() as patched:
        patched.setattr(tensorrt.Refitter, "set_named_weights", lambda *args: args[1] != NORM and accepted(*args))
        with pytest.raises(RuntimeError, match=f"TensorRT refused the new weights of '{NORM}' in the engine"):
            refit(held, tensors)
    with monkeypatch.context() as patched:
        patched.setattr(tensorrt.Refitter, "get_missing_weights", lambda self: [NORM])
        with pytest.raises(RuntimeError, match=f"lacks 1 weights .*; the first is '{NORM}'"):
            refit(held, tensors)
    with monkeypatch.context() as patched:
        patched.setattr(tensorrt.Refitter, "refit_cuda_engine", lambda self: False)
        with pytest.raises(RuntimeError, match="TensorRT could not refit the engine"):
            refit(held, tensors)
    assert engine.refits == 0
    refit(held, tensors)
    assert engine.refits == 1


def test_a_slice_that_does_not_fit_is_refused(standin):
    engine, layout = engine_of(ARCHS["qwen2"])
    held = EngineWeights(engine, layout, CPU, "the engine")
    item = WeightSlice(NORM, ((0, 16),), torch.zeros(16))
    with pytest.raises(RuntimeError, match="begin_update was not called"):
        held.write([item])
    held.begin()
    held.write([item])
    for wrong in (WeightSlice(NORM, ((0, 16),), torch.zeros(16).half()), WeightSlice(NORM, ((0, 8),), torch.zeros(16))):
        with pytest.raises(RuntimeError, match=f"'{NORM}'.*expected"):
            held.write([wrong])


def test_the_stand_in_refuses_what_tensorrt_leaves_undefined(standin):
    """A check of the check: what `EngineWeights` must never do."""
    import tensorrt

    engine, _ = engine_of(ARCHS["qwen2"])
    refitter = tensorrt.Refitter(engine=engine, logger=tensorrt.Logger(tensorrt.Logger.ERROR))

    def give(name, tensor, location=tensorrt.TensorLocation.HOST):
        kind = tensorrt.KINDS[tensor.dtype]
        return refitter.set_named_weights(name, tensorrt.Weights(kind, tensor.data_ptr(), tensor.numel()), location)

    fresh = {name: tensor.clone() for name, tensor in engine.weights.items()}
    assert not give("nothing", fresh[NORM]) and not give(NORM, fresh[NORM][:8]) and not give(NORM, fresh[NORM].half())
    assert not refitter.refit_cuda_engine() and NORM in refitter.get_missing_weights()
    with pytest.raises(tensorrt.StandinError, match="no memory of"):
        give(NORM, fresh[NORM], tensorrt.TensorLocation.DEVICE)
    assert all(give(name, tensor) for name, tensor in fresh.items())
    fresh[NORM].add_(1)
    with pytest.raises(tensorrt.StandinError, match="changed before the refit was over"):
        refitter.refit_cuda_engine()
    assert give(NORM, fresh[NORM])
    kept = fresh.pop(NORM).data_ptr()
    assert kept
    with pytest.raises(tensorrt.StandinError, match="no live buffer|changed"):
        refitter.refit_cuda_engine()
    engine.generating = True
    with pytest.raises(tensorrt.StandinError, match="while the engine generates"):
        refitter.refit_cuda_engine()
