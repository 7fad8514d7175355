"""The engine builder: what it checks without TensorRT-LLM, and in which order it would call it."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from mrl.resharding.trtllm import TrtllmMapping
from tests.checkpoint.formats.trtllm_cases import ARCHS, model, written
from tests.source import ROOT

TOOL = ROOT / "tools" / "build_trtllm_engine.py"

STUB = """
import json, os
__version__ = {version!r}
def log(*what):
    with open(os.environ["STUB_LOG"], "a") as file:
        print(json.dumps(what), file=file)
"""
BUILDER = """
import os
from . import log
class BuildConfig:
    def __init__(self, *, max_input_len=1024, max_seq_len=None, opt_batch_size=8, max_batch_size=2048, max_beam_width=1,
                 max_num_tokens=8192, opt_num_tokens=None, kv_cache_type=None, gather_context_logits=False,
                 gather_generation_logits=False, profiling_verbosity="layer_names_only", use_refit=False,
                 input_timing_cache=None, output_timing_cache="model.cache", use_strip_plan=False):
        self.use_refit, self.max_seq_len = use_refit, max_seq_len
class Engine:
    def __init__(self, rank):
        self.rank = rank
    def save(self, engine_dir):
        log("save", self.rank)
        open(os.path.join(engine_dir, f"rank{self.rank}.engine"), "w").write("engine")
def build(model, build_config):
    log("build", model.rank, build_config.use_refit, build_config.max_seq_len)
    return None if os.environ.get("STUB_FAILS") == str(model.rank) else Engine(model.rank)
"""
MODELS = """
import json
from . import log
class PretrainedConfig:  # from_json_file makes the model's own class, as in 1.x
    def __init__(self, architecture, **rest):
        self.architecture, self.logits_dtype = architecture, rest["logits_dtype"]
    @classmethod
    def from_json_file(cls, config_file):
        config = json.load(open(config_file))
        return MODEL_MAP[config["architecture"]].config_class(**config)
    def set_rank(self, rank):
        self.rank = rank
class LLaMAConfig(PretrainedConfig):
    pass
class LLaMAForCausalLM:
    config_class = LLaMAConfig
    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        assert isinstance(config, LLaMAConfig)
        log("load", config.rank, config.logits_dtype)
        made = cls()
        made.rank = config.rank
        return made
MODEL_MAP = {"LlamaForCausalLM": LLaMAForCausalLM}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return written(tmp_path_factory.mktemp("ckpt"), ARCHS["llama"], TrtllmMapping(2, 1), "bfloat16")


LIMITS = ("--max_batch_size", "8", "--max_input_len", "16", "--max_seq_len", "32")


class Done:
    def __init__(self, returncode, stdout, stderr):
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def build(capsys, monkeypatch):
    """Runs the tool's `main` in this process."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "MV2_")):
            monkeypatch.delenv(name)

    def run(*arguments):
        returncode = runpy.run_path(str(TOOL))["main"]([str(argument) for argument in arguments])
        return Done(returncode, *capsys.readouterr())

    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Puts a package in the place of tensorrt_llm that has the signatures of 1.2.1 and logs the calls."""

    def install(version="1.2.1", **env):
        package = tmp_path / "stub" / "tensorrt_llm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(STUB.format(version=version))
        (package / "builder.py").write_text(BUILDER)
        (package / "models.py").write_text(MODELS)
        monkeypatch.syspath_prepend(str(package.parent))
        for name, value in {"STUB_LOG": str(tmp_path / "log"), **env}.items():
            monkeypatch.setenv(name, value)

    return install


def test_a_dry_run_prints_the_plan_and_leaves_nothing(build, checkpoint, tmp_path):
    done = build("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *LIMITS, "--deep", "--dry-run")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["engines"] == [str(tmp_path / "e" / f"rank{rank}.engine") for rank in range(2)]
    assert plan["build_config"] == {
        "max_batch_size": 8,
        "max_input_len": 16,
        "max_seq_len": 32,
        "max_beam_width": 1,
        "max_num_tokens": 8192,
        "gather_context_logits": False,
        "gather_generation_logits": False,
        "use_strip_plan": False,
        "use_refit": True,
    }
    assert plan["checkpoint"]["num_bytes"] == sum(path.stat().st_size for path in checkpoint.glob("rank*"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_tensorrt_llm_it_says_so_in_one_line_after_its_checks(checkpoint, tmp_path):
    done = subprocess.run(
        [sys.executable, str(TOOL), "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e"), *LIMITS],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and "TensorRT-LLM is not installed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_has_an_example(build, capsys):
    with pytest.raises(SystemExit, match="0"):
        build("--help")
    assert "mpirun -n 4 python tools/build_trtllm_engine.py" in capsys.readouterr().out


REFUSED = {
    "a limit of zero": (("--max_batch_size", "0"), "--max_batch_size is 0"),
    "a prompt longer than a sequence": (("--max_input_len", "64"), "--max_input_len is 64, above --max_seq_len=32"),
    "a prompt longer than a step": (("--max_num_tokens", "15"), "--max_input_len is 16, above --max_num_tokens=15"),
    "a batch larger than a step": (("--max_beam_width", "5000"), "--max_beam_width=5000 is above --max_num_tokens"),
    "more positions than the model": (("--max_seq_len", "99999"), "the model has"),
    "a missing timing cache": (("--input_timing_cache", "nowhere.cache"), "'nowhere.cache' is not a file"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_limits_that_do_not_fit_are_refused(build, checkpoint, tmp_path, flags, message):
    done = build("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *LIMITS, *flags)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr


def test_a_checkpoint_that_is_not_whole_is_refused(build, tmp_path):
    folder = written(tmp_path / "ckpt", model("llama_tiny", num_hidden_layers=1), TrtllmMapping(2))
    (folder / "rank1.safetensors").write_bytes((folder / "rank1.safetensors").read_bytes()[:-4])
    done = build("--checkpoint_dir", folder, "--output_dir", tmp_path / "e")
    assert done.returncode == 2 and "rank1.safetensors' is not a complete safetensors file" in done.stderr
    done = build("--checkpoint_dir", tmp_path / "nowhere")
    assert done.returncode == 2 and "has no config.json" in done.stderr


def test_an_output_folder_with_files_is_left_alone(build, checkpoint, tmp_path):
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "rank0.engine").write_text("mine")
    done = build("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *LIMITS)
    assert done.returncode == 2 and "not an empty folder" in done.stderr
    assert (tmp_path / "e" / "rank0.engine").read_text() == "mine"


def test_processes_of_mpi_must_be_as_many_as_ranks(build, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    done = build("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *LIMITS)
    assert done.returncode == 2 and "MPI started 3 processes; the checkpoint has 2 ranks" in done.stderr


def test_one_process_builds_every_rank_with_refit_in_trtllms_order(build, stub, checkpoint, tmp_path):
    stub()
    done = build("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *LIMITS, "--logits_dtype", "float16")
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert calls == [
        call for rank in (0, 1) for call in (["load", rank, "float16"], ["build", rank, True, 32], ["save", rank])
    ]
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == ["rank0.engine", "rank1.engine"]
    assert not (tmp_path / "e.partial").exists()


def test_a_build_that_fails_leaves_no_folder_that_looks_finished(build, stub, checkpoint, tmp_path):
    stub(STUB_FAILS="1")
    with pytest.raises(RuntimeError, match="no engine for rank1"):
        build("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *LIMITS)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("version", ["1.3.0rc21", "0.21.0"])
def test_versions_without_the_backend_are_refused(build, stub, checkpoint, tmp_path, version):
    stub(version)
    done = build("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *LIMITS)
    assert done.returncode == 3 and f"tensorrt_llm is {version}" in done.stderr
