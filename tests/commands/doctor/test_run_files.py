"""Files that a config names, whole and damaged; what checkpoints take against a real one."""

import pytest

from mrl.checkpoint.formats.megatron import MegatronSource
from mrl.commands.doctor.finding import findings_of
from mrl.commands.doctor.run_files import check_config, check_data, check_model_files, checkpoint_bytes
from mrl.config.config import load
from mrl.errors import UserError
from mrl.trainer.run_plan import load_arch_and_tokenizer
from tests.checkpoint.formats.test_hf import write_folder
from tests.e2e import runs
from tests.resharding.archs import ARCHS

DISK_FACTOR = 1.1
"""Names, shapes and JSON beside the tensors, in a model of 2.4 million parameters."""


def told(findings):
    ((level, found),) = [(each.level, each.found) for each in findings]
    return level, found


@pytest.fixture
def config(tmp_path):
    return lambda *overrides: load(runs.arguments(tmp_path)[1], overrides)


def test_a_config_is_held_against_its_ranks(config):
    level, found = told(check_config(config("parallel.tensor_model_parallel_size=2"), "given.yaml", 4))
    assert level == "ok" and found.endswith("fits 4 ranks (those that the launcher started): tp 2 x cp 1 x dp 2 x pp 1")
    level, found = told(check_config(config("rollout.num_ranks=1"), "given.yaml", 4))
    assert level == "ok" and found.endswith("tp 1 x cp 1 x dp 3 x pp 1, and 1 for rollouts only")
    mistake = config("parallel.tensor_model_parallel_size=3")
    level, found = told(findings_of("config", lambda: check_config(mistake, "given.yaml", 4)))
    assert level == "problem" and "tensor_model_parallel_size" in found
    mistake = config("train.minibatch_size=3")
    level, found = told(findings_of("config", lambda: check_config(mistake, "given_1x2.yaml", 1)))
    assert level == "problem" and "train.minibatch_size=3 does not divide" in found


def test_a_model_that_is_not_there_is_a_problem(config, tmp_path):
    mistake = config("model.preset=null", "model.overrides={}", f"model.path={tmp_path}/none")
    assert told(findings_of("config", lambda: check_config(mistake, "given.yaml", 4)))[0] == "problem"


def test_a_model_folder_whose_file_was_cut_short(tmp_path):
    write_folder(ARCHS["biases, tied"], tmp_path)
    level, found = told(check_model_files(str(tmp_path)))
    assert level == "ok" and "headers complete" in found
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    level, found = told(findings_of("model", lambda: check_model_files(str(tmp_path))))
    assert level == "problem" and "model.safetensors" in found


def test_data_that_is_missing_or_empty(config, tmp_path):
    good, empty = tmp_path / "good.jsonl", tmp_path / "empty.jsonl"
    good.write_text("{}\n")
    empty.touch()
    assert told(check_data(config(f"data.train_files=[{good}]"))) == ("ok", "1 file(s) can be read")
    assert list(check_data(config())) == []
    level, found = told(check_data(config(f"data.train_files=[{good},{empty}]", f"data.val_files={tmp_path}/none")))
    assert level == "problem" and f"'{empty}' is empty; '{tmp_path}/none': No such file" in found


@pytest.mark.parametrize("adapters", [[], ["actor.lora.rank=64"]])
def test_checkpoints_take_on_the_disk_what_was_foretold(adapters, tmp_path):
    """Two commits, the exports beside them and a reference; room for a third commit is asked for."""
    bigger = ["train.num_steps=1", "train.warm_start.num_steps=1", "checkpoint.export_hf=true", "rollout.n=2"]
    bigger += ["model.overrides={hidden_size: 256, num_hidden_layers: 2, intermediate_size: 1024}"]
    runs.train_in_pool(tmp_path, [*bigger, *adapters], 2)
    config = load(tmp_path / "run" / "config.yaml")
    foretold = checkpoint_bytes(config, load_arch_and_tokenizer(config)[0])
    written = sum(path.stat().st_size for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file())
    one = sum(path.stat().st_size for path in (tmp_path / "run/checkpoints/step-00000001").rglob("*") if path.is_file())
    assert foretold < written + one < DISK_FACTOR * foretold
    if adapters:  # its converters have no model in them
        with pytest.raises(UserError) as error:
            MegatronSource(tmp_path / "run/checkpoints/step-00000001")
        assert "only low-rank adapters" in str(error.value)
