"""The acceptance run of a GPU: on this machine's CPU, what its checks catch, and on real hardware."""

import json
import math
import os
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from mrl.acceptance import gpu_checks
from mrl.acceptance.gpu import EXPERTS
from mrl.acceptance.gpu_commands import difference
from mrl.acceptance.gpu_table import CHECKS, SEVERAL
from mrl.acceptance.model import CONFIG, write_random
from mrl.acceptance.result import CheckError, Spec
from mrl.config import load
from mrl.engines.native.engine import NativeEngine
from tests.ranks import run_ranks
from tests.source import ROOT

TINY = [
    "model.overrides.hidden_size=32", "model.overrides.num_hidden_layers=2", "model.overrides.num_attention_heads=4",
    "model.overrides.vocab_size=64", "model.dtype=float32", "rollout.prompt_length=16", "rollout.response_length=8",
    "rollout.gpu_memory_utilization=0.02", "train.batch_size=8", "train.num_steps=2", "run.num_threads=1",
]  # fmt: skip
FEW_EXPERTS = ["model.overrides.num_experts=4", "model.overrides.moe_intermediate_size=32"]


def accept(*words):
    return runpy.run_path(str(ROOT / "tools" / "accept_gpu.py"))["main"]([*map(str, words)])


def read(folder):
    return json.loads((folder / "acceptance-gpu.json").read_text())


def test_a_check_runs_on_a_cpu_in_a_process_of_its_own(tmp_path, capsys):
    assert accept("--device", "cpu", "--output_dir", tmp_path / "out", "--checks", "parity", *TINY) == 0
    (found,) = read(tmp_path / "out")["results"]
    assert found["status"] == "works" and found["facts"]["actor, log-probabilities"] < 1e-5
    page = (tmp_path / "out" / "acceptance-gpu.md").read_text()
    assert "**cpu works here as far as was asked: 1 work, 0 fail, 0 skipped**" in page
    assert CHECKS["parity"].asks in page and "cpu: parity works" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_line(tmp_path, capsys):
    assert accept("--output_dir", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert "torch sees no CUDA device" in said.err and len(said.err.splitlines()) == 1 and said.out == ""
    assert not (tmp_path / "out").exists()


def test_unknown_checks_are_refused(tmp_path, capsys):
    assert accept("--device", "cpu", "--output_dir", tmp_path / "out", "--checks", "partiy") == 2
    assert "no check 'partiy'" in capsys.readouterr().err


def test_every_check_has_its_function():
    assert set(gpu_checks.FUNCTIONS) == set(CHECKS)


class Forgets(NativeEngine):
    """A later refit does not leave it as the first one did."""

    num_refits = 0

    def finish_update(self, policy_version):
        self.num_refits += 1
        if self.num_refits > 1:
            self._weights["final_norm"].mul_(-1.0)
        super().finish_update(policy_version)


def _bend_a_norm(bench):
    tensors = bench.job.policy.named_tensors()
    tensors[next(name for name in tensors if "norm" in name)].mul_(1.01)


def _bring_others(bench):
    bring, policy = bench.job.policy.bring, bench.job.policy

    def bring_and_spoil(*parts):
        bring(*parts)
        next(policy.chunks[0].parameters()).data[0, 0] += 1

    policy.bring = bring_and_spoil


def _mix_up_prompts(bench):
    """Those that share a prompt see it without its first token."""
    schedule = bench.job.policy._schedule
    lay = schedule._packed

    def laid(*given, **options):
        packed = lay(*given, **options)
        if packed.families is not None:
            runs = packed.families
            runs.first_R[runs.first_R < runs.begin_R] += 1
        else:
            packed.keys.row_S[packed.keys.row_S == 0] = 1  # nothing is compiled here: the second one's in its place
        return packed

    schedule._packed = laid


def _skip_the_update(bench):
    update = bench.job.policy.update
    bench.job.policy.update = lambda *given: update(*given) | {"actor/grad_norm": 0.0}


ASKED = {
    "parity": ("parity", {}, None),
    "parity of experts": ("experts", {}, None),
    "shared": ("shared", {}, None),
    "keys of the wrong prompt": ("shared", {}, _mix_up_prompts),
    "cycles": ("cycles", {}, None),
    "offload": ("offload", {}, None),
    "a bent norm": ("parity", {}, _bend_a_norm),
    "a gradient of nothing": ("parity", {}, _skip_the_update),
    "an engine that forgets": ("cycles", {"rollout.name": f"{__name__}:Forgets"}, None),
    "weights that come back as others": ("offload", {}, _bring_others),
}
"""What is looked at -> its check, settings, and the fault that is planted."""

SAID = {
    "keys of the wrong prompt": "log-probabilities: ",
    "a bent norm": "log-probabilities: ",
    "a gradient of nothing": "gradient: 1 from transformers",
    "an engine that forgets": "the engine's answers moved",
    "weights that come back as others": "the weights that came back add up to",
}


def looked_at(folder, models):
    """What each check says, with and without faults; and the facts of the update's speed."""
    from mrl.distributed import launch
    from mrl.megatron import parallel

    parallel.destroy()
    launch.stop()
    said = {}
    for what, (check, settings, fault) in ASKED.items():
        own = [f"{key}={value}" for key, value in settings.items()]
        said[what] = _said(check, folder, [*models[CHECKS[check].model], *CHECKS[check].settings, *own], fault)
    facts = _said("update", folder, models["dense"], None)
    launch.start("cpu", num_threads=1)
    return said, facts


def _said(check, folder, overrides, fault):
    spec = Spec(
        config=f"{folder}/config.yaml", overrides=[*overrides, f"run.output_dir={folder}/run"], checks=[check],
        lines="", folder=folder, module="mrl.acceptance.gpu_checks", tools=str(ROOT / "tools"),
    )  # fmt: skip
    with gpu_checks.opened(spec) as bench:
        if fault:
            fault(bench)
        try:
            facts = gpu_checks.FUNCTIONS[check](bench)
        except CheckError as error:
            return str(error), error.facts
    return "", facts


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of the config, and overrides of each model."""
    folder = tmp_path_factory.mktemp("accept")
    (folder / "config.yaml").write_text(CONFIG)
    made = {}
    for name, sizes in (("dense", TINY), ("experts", [*EXPERTS, *TINY, *FEW_EXPERTS])):
        made[name] = [*sizes, *write_random(load(folder / "config.yaml", sizes), Path(folder / name))]
    return str(folder), made | {"large": TINY}


def test_each_check_catches_what_it_is_for(models):
    ((said, (_, speed)),) = run_ranks(1, looked_at, *models)
    for what, (words, _) in said.items():
        assert SAID.get(what, "") in words and bool(words) == (what in SAID), (what, words)
    assert said["parity of experts"][1]["gradient norm"] > 0
    assert 0.01 < speed["ratio"] < 100 and speed["layers"] == "Megatron's local ones"


def linked():
    gpu_checks.LINK_BYTES = 1 << 16

    return gpu_checks.links(torch.device("cpu"))


def test_sums_and_messages_go_between_ranks():
    for facts in run_ranks(2, linked):
        assert facts["GB/s of a message, each way"] > 0 and facts["GB/s of a sum"] > 0


def test_the_metric_that_differs_most_is_found():
    same = {"loss": 1.0, "reward": 0.0, "nan": math.nan}
    assert difference(same, dict(same))[1] == 0.0
    assert difference(same, {**same, "loss": 1.5}) == ("loss", pytest.approx(1 / 3))
    assert difference(same, {**same, "more": 1.0}) == ("more", math.inf)
    assert difference(same, {**same, "reward": math.nan})[0] == "reward"


# on real hardware


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    """One run of everything; MRL_ACCEPTANCE_GPU: further words of the command line."""
    folder = tmp_path_factory.mktemp("accepted") / "out"
    status = accept("--output_dir", folder, *shlex.split(os.environ.get("MRL_ACCEPTANCE_GPU", "")))
    assert status in (0, 1), "the command could not be used"
    return {result["check"]: result for result in read(folder)["results"]}


def assert_accepted(result, check):
    if result is None or result["status"] == "skipped":
        pytest.skip("not asked" if result is None else result["said"])
    assert result["status"] == "works", f"{result['said']} ({result['log']}): {CHECKS[check].remedy}"


@pytest.mark.gpu
@pytest.mark.parametrize("check", [name for name, check in CHECKS.items() if check.num_ranks < SEVERAL])
def test_on_a_gpu(accepted, check):
    assert_accepted(accepted.get(check), check)


@pytest.mark.multigpu
@pytest.mark.parametrize("check", [name for name, check in CHECKS.items() if check.num_ranks >= SEVERAL])
def test_on_two_gpus(accepted, check):
    assert_accepted(accepted.get(check), check)
