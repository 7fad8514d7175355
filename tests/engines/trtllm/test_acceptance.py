"""The acceptance run: whole on the stand-in, its processes, what its checks catch, and on real hardware."""

import importlib.util
import json
import os
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from acceptance.checks import FUNCTIONS
from acceptance.fixture import Bench
from acceptance.model import CONFIG
from acceptance.page import LATE, verdict, write_page
from acceptance.result import CheckError
from acceptance.trtllm import Acceptance
from acceptance.trtllm_table import CHECKS, FP8, PAGE, SETTINGS

from mrl.config.config import load
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.resharding.trtllm import TrtllmMapping
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from tests import warm
from tests.engines.trtllm.conftest import STANDIN, forget
from tests.engines.trtllm.engines import build_engines
from tests.engines.trtllm.signature import FLAVOUR_VARIABLE
from tests.ranks import run_ranks
from tests.source import ROOT
from tests.trainer.test_weight_sync_check import Claims

TOOL = ROOT / "tools" / "accept_trtllm.py"
TINY = [
    "model.overrides.hidden_size=32", "model.overrides.intermediate_size=64", "model.overrides.num_hidden_layers=2",
    "model.overrides.num_attention_heads=4", "model.overrides.vocab_size=16", "model.dtype=float32",
    "rollout.prompt_length=16", "rollout.response_length=8", "rollout.gpu_memory_utilization=0.02",
    "run.num_threads=1",
]  # fmt: skip


WIDE = [
    "model.overrides.hidden_size=256", "model.overrides.intermediate_size=256", "model.overrides.num_key_value_heads=2",
]  # fmt: skip
"""Whole blocks of FP8."""


def accept(*words):
    return runpy.run_path(str(TOOL))["main"]([*map(str, words)])


def read(folder):
    return json.loads((folder / "acceptance.json").read_text())


@pytest.fixture
def on_path(standin):
    """The stand-in for the processes that are started, too; they are forked."""
    standin.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(STANDIN))))
    standin.setattr(sys, "executable", warm.python())


@pytest.mark.slow
def test_a_whole_run_on_the_stand_in(on_path, tmp_path, capsys):
    asked = [name for name in CHECKS if name != "fp8"]
    words = ("--output_dir", tmp_path / "llm", "--engines", "trtllm", "--num_ranks", 1, "--checks", *asked)
    assert accept(*words, *TINY) == 0
    found = read(tmp_path / "llm")
    states = {result["check"]: result["status"] for result in found["results"]}
    assert states == dict.fromkeys(asked, "works") | {"graphs_asleep": "skipped"}  # 1.2 has none then
    assert found["versions"]["tensorrt_llm"] == "1.2.1"
    facts = {result["check"]: result["facts"] for result in found["results"]}
    assert facts["contract"]["probe"] == "scores logits / temperature; logits are returned"
    assert 0 < facts["logprobs"]["mean difference, nats"] < 1e-5 < facts["logprobs"]["tokens"]
    page = (tmp_path / "llm" / "acceptance.md").read_text()
    assert "**trtllm works here in all checks that ran: 12 work, 0 fail, 1 skipped**" in page
    assert "trtllm: graphs works" in capsys.readouterr().out


@pytest.mark.slow
def test_fp8_on_the_stand_in_of_a_version_that_has_it(on_path, standin, tmp_path):
    words = ("--output_dir", tmp_path / "out", "--engines", "trtllm", "trtllm_engine", "--checks", "fp8", *TINY, *WIDE)
    standin.setenv(FLAVOUR_VARIABLE, "1.3")
    assert accept(*words) == 0
    found, built = read(tmp_path / "out")["results"]
    assert (found["status"], built["status"]) == ("works", "skipped")
    facts = found["facts"]
    rounding = facts["mean difference that rounding the weights makes, nats"]
    assert facts["mean difference, nats"] < rounding / 2  # what is left is bfloat16
    assert facts["mean difference from the actor's own weights, nats"] == pytest.approx(rounding, rel=0.5)
    assert facts["mean weight that corrects a token"] == pytest.approx(1.0, abs=0.2)


BUILD = """
import json, sys
print(json.dumps(sys.argv))
if "build_trtllm_engine" in sys.argv[0] and not json.load(open(sys.argv[0] + ".json"))["works"]:
    sys.exit("tensorrt.Error: no tactic for this layer")
"""


@pytest.mark.parametrize("works", [True, False])
def test_engines_are_built_as_preflight_says(works, tmp_path):
    for name in ("convert_hf_to_trtllm.py", "build_trtllm_engine.py"):
        (tmp_path / name).write_text(BUILD)
        (tmp_path / f"{name}.json").write_text(json.dumps({"works": works}))
    found = Acceptance(folder=tmp_path / "out", tools=tmp_path, engines=["trtllm_engine"], overrides=TINY)
    (found.folder / "config.yaml").write_text(CONFIG)
    own = ["rollout.name=trtllm_engine", "rollout.enforce_eager=true", *found._model(found.load(()))]
    engines = found._build(own)
    logs = [(found.folder / "logs" / f"{name}.log") for name in ("convert_hf_to_trtllm", "build_trtllm_engine")]
    convert, build = (log.read_text().splitlines()[0] for log in logs)
    for words, line in (
        ((f"{found.folder}/model", f"{found.folder}/trtllm_checkpoint", "float32"), convert),
        ((f"{found.folder}/trtllm_checkpoint", f"{found.folder}/trtllm_engines", "--max_seq_len", "24"), build),
    ):
        assert set(words) <= set(json.loads(line))
    if works:
        assert engines == found.folder / "trtllm_engines" and not found.results
    else:
        assert engines is None
        states = {result.check: result.status for result in found.results}
        assert states == {"start": "fails"} | {name: "skipped" for name in CHECKS if name != "start"}
        assert "build_trtllm_engine.py: exit status 1: tensorrt.Error: no tactic" in found.results[0].said


FAKE = """
import json, sys, time
spec = json.load(open(sys.argv[-1]))
def tell(**line):
    with open(spec["lines"], "a") as lines:
        lines.write(json.dumps(line) + chr(10))
tell(begins="start")
if "rollout.temperature=0.7" in spec["overrides"]:
    sys.exit("RuntimeError: no such kernel")
tell(ended="start", outcome=("works", "", {}), took_s=1.0)
for check in spec["checks"]:
    tell(begins=check)
    if check == "refit":
        time.sleep(60)
    if check == "qkv":
        sys.exit("RuntimeError: device-side assert")
    outcome = ("fails", "rank 1: 0 GiB freed", {"freed": 0.0}) if check == "sleep" else ("works", "", {})
    tell(ended=check, outcome=outcome, took_s=1.0)
tell(begins="end")
"""


@pytest.mark.slow
def test_a_check_that_hangs_or_dies_takes_no_other_with_it(on_path, tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    found = Acceptance(
        folder=tmp_path / "out", tools=TOOL.parent, engines=["trtllm"], overrides=TINY, timeout_s=5.0,
        start_timeout_s=60.0, launcher=[sys.executable, str(tmp_path / "fake.py")],
    )  # fmt: skip
    results = found.run()
    states = {result.check: (result.status, result.said) for result in results}
    works = ("works", "")
    assert [result.check for result in results if result.late] == ["refit"]
    page = write_page(PAGE, tmp_path, results, {}, command="", took_s=0.0).read_text()
    assert page.count(LATE) == 1 and CHECKS["refit"].means not in page and CHECKS["qkv"].means in page
    assert states == {
        "start": works,
        "device": works,
        "refit": ("fails", "no result in 5 s; last log message: nothing"),
        "qkv": ("fails", "the process ended with status 1: RuntimeError: device-side assert"),
        "sleep": ("fails", "rank 1: 0 GiB freed"),
        "pause": works,
        "ends": works,
        "seeds": works,
        "logprobs": works,
        "contract": (
            "skipped",
            "it did not start: the process ended with status 1: RuntimeError: no such kernel",
        ),
        "graphs": works,
        "graphs_asleep": works,
        "fp8": works,
        "end": works,
    }
    page = write_page(PAGE, found.folder, found.results, found.versions, command="it", took_s=3.0).read_text()
    assert "10 work, 3 fail, 1 skipped" in verdict(found.results)
    for said in (
        "### trtllm: sleep",
        CHECKS["sleep"].means,
        CHECKS["sleep"].remedy,
        "trtllm-plain-3.log",
        "- freed: 0",
    ):
        assert said in page


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is installed")
def test_without_tensorrt_llm_it_says_what_is_missing(tmp_path, capsys):
    assert accept("--output_dir", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "TensorRT-LLM is not installed" in said and "nvcr.io/nvidia/tensorrt-llm/release" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--checks", "refitt"), "unknown check 'refitt'"), (("--engines", "vllm"), "unknown engine 'vllm'")],
)
def test_unknown_names_are_refused(words, said, tmp_path, capsys):
    assert accept("--output_dir", tmp_path / "out", *words) == 2
    assert said in capsys.readouterr().err


class Deaf(Claims):
    """One of its tensors never arrives, in the same way every time."""

    def spoil(self):
        self._weights["layers.0.qkv"].fill_(0.1)


class Twice(Claims):
    """A norm is processed once more in each refit."""

    def spoil(self):
        self._weights["layers.1.post_norm"].mul_(self.num_refits)


class Stuck(Claims):
    """It computes with the weights of its first refit, as captured kernels may."""

    def spoil(self):
        if self.num_refits == 1:
            self.first = {name: tensor.clone() for name, tensor in self._weights.items()}
        for name, tensor in self._weights.items():
            tensor.copy_(self.first[name])


class Forgets(Claims):
    """Its weights do not outlive sleep."""

    def wake(self):
        super().wake()
        self._weights["final_norm"].mul_(-1.0)
        self._model.refresh()


class Hot(Claims):
    """Its log-probabilities are of another temperature."""

    def generate(self, prompts, sampling):
        rollouts = super().generate(prompts, sampling)
        for rollout in rollouts:
            rollout.rollout_logprobs = [x * 2 for x in rollout.rollout_logprobs]
        return rollouts


class Mixed(Claims):
    """The scale of a block is another one's."""

    def spoil(self):
        self._weights["layers.0.gate_up_scale_inv"][0].mul_(4.0)


class Endless(Claims):
    """It goes on behind an end token."""

    def generate(self, prompts, sampling):
        return super().generate(prompts, replace(sampling, ignore_eos=True))


class Echo(Claims):
    """Every sample of a prompt is the first."""

    def generate(self, prompts, sampling):
        rollouts = super().generate(prompts, sampling)
        for rollout in rollouts:
            first = next(each for each in rollouts if each.prompt.uid == rollout.prompt.uid)
            rollout.response_ids, rollout.rollout_logprobs = first.response_ids, first.rollout_logprobs
        return rollouts


CAUGHT = {
    "native": {},
    "trtllm_engine": {},
    "Deaf": {"logprobs": "engine and actor differ by"},
    "Twice": {"refit": "a second sync of the same weights changed the responses"},
    "Stuck": {"refit": "a sync of other weights did not change the responses"},
    "Forgets": {"sleep": "the responses changed after sleeping and waking"},
    "Hot": {"logprobs": "engine and actor differ by"},
    "Endless": {"ends": "with the end token"},
    "Echo": {"seeds": "4 samples of one prompt are all the same"},
}
"""Engine -> check -> what it says; the other checks may fail too."""


ASKED = ("device", "refit", "sleep", "ends", "seeds", "logprobs")
IN_FP8 = ("native", "Mixed")


def looked_at(folder, overrides, built):
    """What each check says of each engine."""
    from mrl.distributed import launch
    from mrl.megatron import parallel_state

    parallel_state.destroy()
    launch.shutdown_distributed()
    sys.path.insert(0, str(STANDIN))
    forget()
    said = {}
    for name in CAUGHT:
        engine = f"tests.engines.trtllm.test_acceptance:{name}" if name[0].isupper() else name
        own = [f"rollout.name={engine}", *([f"rollout.engine_dir={built}"] if name == "trtllm_engine" else [])]
        config = load(Path(folder) / "config.yaml", [*overrides, *own])
        with open_trainer(build_run_plan(config), log=False) as trainer:
            bench = Bench(trainer, Path(folder))
            said[name] = {check: _said(check, bench) for check in ASKED}
    for name in IN_FP8:
        engine = f"tests.engines.trtllm.test_acceptance:{name}" if name[0].isupper() else name
        own = [f"rollout.name={engine}", *SETTINGS[FP8]]
        with open_trainer(build_run_plan(load(Path(folder) / "config.yaml", [*overrides, *own])), log=False) as trainer:
            said[name, FP8] = _said("fp8", Bench(trainer, Path(folder)))
    sys.path.remove(str(STANDIN))
    forget()
    launch.init_distributed("cpu", num_threads=1)
    return said


def _said(check, bench):
    try:
        FUNCTIONS[check](bench)
    except CheckError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_each_check_catches_what_it_is_for(standin, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    acceptance = Acceptance(folder=tmp_path / "out", tools=TOOL.parent, overrides=TINY)
    model = acceptance._model(load(tmp_path / "config.yaml", TINY))
    arch = arch_from_folder(tmp_path / "out" / "model")
    limits = {"max_batch_size": 32, "max_input_len": 16, "max_seq_len": 24, "max_num_tokens": 2048}
    engines = build_engines(tmp_path / "built", arch, TrtllmMapping(), **limits)
    own = ["rollout.enforce_eager=true", f"run.output_dir={tmp_path}/run"]
    (said,) = run_ranks(1, looked_at, str(tmp_path), [*TINY, *model, *own], str(engines))
    for name in ("native", "trtllm_engine"):
        assert said[name] == dict.fromkeys(ASKED, "")
    assert said["native", FP8] == "" and "under the dequantised FP8 weights" in said["Mixed", FP8]
    for name, expected in CAUGHT.items():
        for check, words in expected.items():
            assert words in said[name][check], (name, check, said[name])
        assert said[name]["device"] == ""


# on real hardware


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    """One run of everything; MRL_ACCEPTANCE: further words of the command line, as '--model_dir Qwen3-0.6B'."""
    folder = tmp_path_factory.mktemp("accepted") / "out"
    status = accept("--output_dir", folder, *shlex.split(os.environ.get("MRL_ACCEPTANCE", "")))
    assert status in (0, 1), "the command could not be used"
    return {(result["engine"], result["check"]): result for result in read(folder)["results"]}


@pytest.mark.trtllm
@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", ["native", "trtllm", "trtllm_engine"])
def test_on_real_hardware(accepted, engine, check):
    result = accepted.get((engine, check))
    if result is None or result["status"] == "skipped":
        pytest.skip("not asked" if result is None else result["said"])
    assert result["status"] == "works", f"{result['said']} ({result['log']}): {CHECKS[check].remedy}"


def test_a_folder_is_used_once(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="an acceptance run already"):
        Acceptance(folder=tmp_path, tools=TOOL.parent)
