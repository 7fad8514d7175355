"""Built engines are refused before anything starts where they are missing or of something else."""

import json

import pytest

from mrl.checkpoint.formats.trtllm_config import TrtllmConfig, to_json
from mrl.config.config import Config, load
from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.resharding.trtllm import TrtllmMapping
from mrl.trainer.validation.validate import check
from tests.e2e.runs import CONFIG

VOCAB = 16
OVERRIDES = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "num_key_value_heads": 2}
ARCH = arch_from_preset("qwen2_tiny", {**OVERRIDES, "num_attention_heads": 4}, VOCAB)
ONE = TrtllmMapping()
BUILD = {
    "max_batch_size": 16,
    "max_input_len": 12,
    "max_seq_len": 16,
    "max_num_tokens": 8192,
    "use_refit": True,
    "kv_cache_type": "continuous",
}
SETTINGS = ("rollout.name=trtllm_engine", "rollout.enable_prefix_caching=false", "rollout.enforce_eager=true")


@pytest.fixture
def engines(tmp_path):
    """Writes the folder of a build; the engine files are not looked into."""

    def write(arch=ARCH, mapping=ONE, dtype="float32", pretrained=(), **build):
        given = to_json(TrtllmConfig(arch, mapping, dtype)) | dict(pretrained)
        config = {"version": "1.2.1", "pretrained_config": given, "build_config": BUILD | build}
        (tmp_path / "config.json").write_text(json.dumps(config))
        for rank in range(mapping.world_size):
            (tmp_path / f"rank{rank}.engine").touch()
        return str(tmp_path)

    return write


@pytest.fixture
def checked(tmp_path_factory):
    def run(*overrides, world_size=1, settings=SETTINGS):
        file = tmp_path_factory.mktemp("config") / "config.yaml"
        file.write_text(CONFIG)
        config: Config = load(file, [*settings, *overrides])
        check(config, ARCH, world_size, VOCAB)

    return run


def refusal(checked, *overrides, **how):
    with pytest.raises(UserError) as caught:
        checked(*overrides, **how)
    return str(caught.value)


def test_engines_of_the_run_pass(engines, checked):
    checked(f"rollout.engine_dir={engines()}")
    two = engines(mapping=TrtllmMapping(2, 2), dtype="bfloat16")
    sizes = ("rollout.tensor_model_parallel_size=2", "rollout.pipeline_model_parallel_size=2")
    checked(f"rollout.engine_dir={two}", *sizes, "rollout.dtype=bfloat16", world_size=4)


def test_without_a_folder_the_commands_that_make_one_are_told(checked):
    said = refusal(checked, "rollout.tensor_model_parallel_size=2", world_size=2)
    assert "needs rollout.engine_dir" in said
    assert "convert_hf_to_trtllm.py --model_dir MODEL --output_dir CHECKPOINT --dtype float32 --tp_size 2" in said
    assert "build_trtllm_engine.py --checkpoint_dir CHECKPOINT --output_dir ENGINES --max_batch_size 16" in said
    assert "--max_input_len 12 --max_seq_len 16 --max_num_tokens 8192 --kv_cache_type continuous" in said


ANOTHER_SIZE = {"hidden_size": 48, "head_size": 12, "rotary_embedding_dim": 12}
MISMATCHES = {
    "ranks": ({"mapping": TrtllmMapping(2)}, "tp_size is 2 in the engines, 1 in the run"),
    "stages": ({"mapping": TrtllmMapping(1, 2)}, "pp_size is 2 in the engines, 1 in the run"),
    "dtype": ({"dtype": "bfloat16"}, "dtype is bfloat16 in the engines, float32 in the run"),
    "batch": ({"max_batch_size": 8}, "max_batch_size is 8 in the engines, 16 in the run"),
    "prompts": ({"max_input_len": 11}, "max_input_len is 11 in the engines, 12 in the run"),
    "sequences": ({"max_seq_len": 15}, "max_seq_len is 15 in the engines, 16 in the run"),
    "tokens": ({"max_num_tokens": 64}, "max_num_tokens is 64 in the engines, 8192 in the run"),
    "refit": ({"use_refit": False}, "built without use_refit"),
    "another size": ({"pretrained": ANOTHER_SIZE}, "hidden_size is 48 in the engines, 32 in the model"),
    "another rope": ({"pretrained": {"rotary_base": 5.0}}, "rotary_base is 5.0 in the engines"),
    "no cache": ({"kv_cache_type": "KVCacheType.DISABLED"}, "kv_cache_type is disabled in the engines"),
    "a paged cache": ({"kv_cache_type": None}, "kv_cache_type is paged in the engines"),
    "a limit that is none": ({"max_seq_len": None}, "build_config.max_seq_len is None"),
}


@pytest.mark.parametrize(("built", "said"), MISMATCHES.values(), ids=MISMATCHES)
def test_engines_of_something_else_are_refused(engines, checked, built, said):
    message = refusal(checked, f"rollout.engine_dir={engines(**built)}")
    assert said in message


def test_folders_that_hold_no_engines_are_refused(engines, checked, tmp_path):
    assert "has no config.json" in refusal(checked, f"rollout.engine_dir={tmp_path}")
    folder = engines(mapping=TrtllmMapping(2))
    (tmp_path / "rank1.engine").unlink()
    assert "lacks rank1.engine; config.json has 2 ranks" in refusal(checked, f"rollout.engine_dir={folder}")
    (tmp_path / "config.json").write_text("{}")
    assert "is not from a built engine" in refusal(checked, f"rollout.engine_dir={folder}")


def test_settings_that_a_built_engine_cannot_keep_are_refused(engines, checked):
    folder = f"rollout.engine_dir={engines()}"
    said = refusal(checked, folder, settings=("rollout.name=trtllm_engine",))
    assert "rollout.enable_prefix_caching=True is refused with rollout.name=trtllm_engine" in said
    assert "rollout.enforce_eager=False is refused with rollout.name=trtllm_engine" in said
    said = refusal(checked, folder, "rollout.max_num_batched_tokens=8")
    assert "rollout.enable_chunked_prefill=True is refused" in said


def test_a_folder_that_nothing_reads_is_refused(engines, checked):
    said = refusal(checked, f"rollout.engine_dir={engines()}", settings=())
    assert "is refused with rollout.name=native: only rollout.name=trtllm_engine reads prebuilt engines" in said
