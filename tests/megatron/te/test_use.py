"""Where TransformerEngine's layers are used, where not, and that this is said; a broken one hurts nobody."""

import json
import subprocess
import sys

import pytest

from mrl.config.config import ActorConfig, Config, ModelConfig, ParallelConfig
from mrl.errors import UserError
from mrl.models import transformer_engine
from mrl.trainer.validation.model import model_rules
from tests.e2e import runs
from tests.megatron.actors import ARCHS, MIXTURES

DENSE, EXPERTS = ARCHS["qwen3"], MIXTURES["qwen3_moe"]
WHEEL = pytest.mark.te


def config(impl="auto", dtype="bfloat16", **parallel):
    return Config(
        model=ModelConfig(dtype=dtype),
        actor=ActorConfig(transformer_impl=impl),
        parallel=ParallelConfig(**parallel),
    )


def said_by(code, **variables):
    """What a new process prints, where warnings are errors."""
    words = [sys.executable, "-W", "error::RuntimeWarning", "-W", "error::UserWarning:mrl", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


SEEN = """
import json, sys
from mrl.models import transformer_engine as te
{before}
import mrl.megatron
from megatron.core.transformer import transformer_block as block, mlp
from megatron.core.optimizer import Adam
print(json.dumps([te.why_unusable("cpu"), te.why_unusable("cuda"), block.HAVE_TE, mlp.HAVE_TE, Adam.__module__]))
"""
HALF = """
import types
te.DEVICES = {"cpu", "cuda"}
sys.modules["transformer_engine"] = whole = types.ModuleType("transformer_engine")
whole.__spec__, whole.__path__ = types.SimpleNamespace(submodule_search_locations=[]), []
sys.modules["transformer_engine.pytorch.optimizers"] = half = types.ModuleType("transformer_engine.pytorch.optimizers")
half.FusedAdam = half.multi_tensor_applier = half.multi_tensor_scale = half.multi_tensor_l2norm = None
"""


@pytest.mark.slow
@WHEEL
def test_a_wheel_without_its_libraries_is_not_used_and_does_not_fail():
    """`pip install transformer-engine` alone: Megatron would end in its RuntimeError."""
    cpu, cuda, *found = said_by(SEEN.format(before=""))
    assert cpu == "the run is on a CPU"
    assert cuda.startswith("it is installed but does not import: RuntimeError: Found empty `transformer-engine` meta")
    assert found == [False, False, "torch.optim.adamw"]


@pytest.mark.slow
def test_megatron_takes_nothing_of_one_that_imports_in_part():
    cpu, _, *found = said_by(SEEN.format(before=HALF))
    assert (
        cpu == "it is installed but does not import: ModuleNotFoundError: No module named 'transformer_engine.pytorch'"
    )
    assert found == [False, False, "torch.optim.adamw"]


@pytest.fixture
def on_gpu(monkeypatch):
    """`on_gpu(why, kind)`: what this machine's GPU and TransformerEngine would say."""

    def become(why=None, kind="fused"):
        monkeypatch.setattr(transformer_engine, "why_unusable", lambda device: why)
        monkeypatch.setattr(transformer_engine, "attention", lambda config, arch: kind)
        monkeypatch.setattr(transformer_engine, "supports_prefix_sharing", lambda config, arch: kind == "fused")

    return become


BROKEN = "it is installed but does not import: ImportError: undefined symbol"


@pytest.mark.parametrize("arch", [MIXTURES["gpt_oss"], ARCHS["gemma3_text"]], ids=["sinks", "two rotary bases"])
def test_where_it_has_no_attention_for_a_model_its_other_layers_are_used(arch, on_gpu):
    on_gpu(kind=None)
    assert transformer_engine.asked_for(config(), arch) and transformer_engine.why_local(config(), arch, "cuda") is None
    assert "PyTorch's attention" in transformer_engine.described(config(), arch, "cuda")
    transformer_engine.check(config(), arch, "cuda")


def test_float32_falls_to_the_local_layers_and_says_so(on_gpu):
    on_gpu()
    assert transformer_engine.why_local(config(), DENSE, "cuda") is None
    assert "no float32 (model.dtype)" in transformer_engine.described(config(dtype="float32"), DENSE, "cuda")
    transformer_engine.check(config(dtype="float32"), EXPERTS, "cuda")
    assert "not supported with model.dtype=float32" in "".join(model_rules(config("te", "float32")))


def test_a_broken_one_is_told_with_its_error_and_experts_are_refused(on_gpu):
    on_gpu(BROKEN)
    assert BROKEN in transformer_engine.described(config(), DENSE, "cuda")
    transformer_engine.check(config(), DENSE, "cuda")
    with pytest.raises(UserError, match="4 experts per layer.*undefined symbol.*actor.transformer_impl=local"):
        transformer_engine.check(config(), EXPERTS, "cuda")
    transformer_engine.check(config("local"), EXPERTS, "cuda")
    with pytest.raises(UserError, match="actor.transformer_impl=te, but .*undefined symbol"):
        transformer_engine.check(config("te"), DENSE, "cuda")
    transformer_engine.check(config(), EXPERTS, "cpu")


def test_a_gpu_without_an_attention_for_packed_sequences_is_told_of_flash_attn(on_gpu):
    on_gpu(kind=None)
    assert transformer_engine.FLASH_ATTN in transformer_engine.described(config(), DENSE, "cuda")
    with pytest.raises(UserError, match="install.*flash-attn"):
        transformer_engine.check(config(), EXPERTS, "cuda")
    on_gpu(kind="unfused")
    told = transformer_engine.described(config(), DENSE, "cuda")
    assert "slow" in told and "the prompt is computed once per sample" in told


def test_a_run_tells_whose_layers_it_has(tmp_path):
    runs.train_in_pool(tmp_path, ["train.num_steps=1", "train.warm_start.num_steps=0"], 1)
    told = "the actor's layers are Megatron's local ones, not TransformerEngine's: "
    notes = (tmp_path / "run" / "notes.jsonl").read_text()
    (start,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert told in notes and start["layers"].startswith(told)
