"""The acceptance run of a GPU: on this machine's CPU, what its checks catch, and on real hardware."""

import json
import math
import os
import runpy
import shlex
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from acceptance import gpu_checks, gpu_commands
from acceptance.gpu import EXPERTS, LARGE, GpuAcceptance, chains
from acceptance.gpu_commands import difference
from acceptance.gpu_table import CHECKS, SEVERAL
from acceptance.model import CONFIG, write_random
from acceptance.result import CheckError, Spec
from bench.megatron_baseline import fitting_rows

from mrl.config.config import load
from mrl.engines.native.engine import NativeEngine
from mrl.models.presets import arch_from_preset
from tests.ranks import run_ranks
from tests.source import ROOT

TINY = [
    "model.overrides.hidden_size=32", "model.overrides.num_hidden_layers=2", "model.overrides.num_attention_heads=4",
    "model.overrides.vocab_size=64", "model.dtype=float32", "rollout.prompt_length=16", "rollout.response_length=8",
    "rollout.gpu_memory_utilization=0.02", "train.batch_size=8", "train.num_steps=2", "run.num_threads=1",
]  # fmt: skip
FEW_EXPERTS = ["model.overrides.num_experts=4", "model.overrides.moe_intermediate_size=32"]


on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def accept(*words):
    return runpy.run_path(str(ROOT / "tools" / "accept_gpu.py"))["main"]([*map(str, words)])


def read(folder):
    return json.loads((folder / "acceptance-gpu.json").read_text())


@pytest.mark.slow
def test_checks_run_on_a_cpu_beside_each_other_each_in_a_process_of_its_own(tmp_path, capsys):
    asked = ("--workers", 2, "--checks", "parity_local", "parity", "attention")
    assert accept("--device", "cpu", "--output_dir", tmp_path / "out", *asked, *TINY) == 0
    results = {each["check"]: each for each in read(tmp_path / "out")["results"]}
    assert [(name, each["status"]) for name, each in results.items()] == [
        ("attention", "works"), ("parity", "works"), ("parity_local", "skipped")
    ]  # fmt: skip
    assert results["parity"]["facts"]["actor, log-probabilities"] < 1e-5
    assert results["attention"]["facts"]["decoding"]["s of a known shape"] > 0
    page = (tmp_path / "out" / "acceptance-gpu.md").read_text()
    assert "**cpu works here in all checks that ran: 2 work, 0 fail, 1 skipped**" in page
    assert CHECKS["parity"].asks in page and "cpu: parity works" in capsys.readouterr().out


def test_what_measures_runs_alone_and_what_reads_another_check_runs_behind_it():
    found = chains(list(CHECKS))
    assert sorted(name for chain in found for name in chain) == sorted(
        name for name, check in CHECKS.items() if not check.alone
    )
    assert ["refit", "graphs", "graphs_asleep"] in found and ["parity"] in found
    assert chains(["graphs", "graphs_asleep", "update"]) == [["graphs"], ["graphs_asleep"]]
    assert all(CHECKS[name].alone for name in ("device", "attention", "update", "rollout", "cycles", "offload"))
    assert {check.after for check in CHECKS.values()} == {"", "refit"} and not CHECKS["refit"].alone


@pytest.mark.parametrize("word", ["0", "-1", "many"])
def test_a_number_of_workers_is_one_from_one_on(word, tmp_path, capsys):
    with pytest.raises(SystemExit):
        accept("--device", "cpu", "--output_dir", tmp_path / "out", "--checks", "partiy", f"--workers={word}")
    assert word in capsys.readouterr().err


@on_a_cpu
def test_a_stop_ends_what_all_workers_wait_for(tmp_path):
    run = GpuAcceptance(folder=tmp_path / "out", tools=ROOT / "tools", device="cpu", checks=["parity", "refit"])
    (run.folder / "cpu").mkdir()
    hangs = ("sh", "-c", "sleep 100", "-")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(run.session, "cpu", name, [name], [], launcher=hangs) for name in run.checks]
        assert not wait(waiting, 0.5).done
        run.stop()
        assert not wait(waiting, 20).not_done
    assert run.results == [] and [each.result() for each in waiting] == [None, None]


@on_a_cpu
@pytest.mark.parametrize(("chosen", "added"), [((), True), (("te",), False), (("local",), False), (("auto",), True)])
def test_experts_start_with_local_layers_where_the_user_chose_none(chosen, added, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = [*EXPERTS, *(f"actor.transformer_impl={each}" for each in chosen)]
    spec = Spec(f"{tmp_path}/config.yaml", words, ["experts"], "", "", "", "")
    expected = [*words, "actor.transformer_impl=local"] if added else words
    assert list(gpu_checks.for_this_machine(spec).overrides) == expected


def test_the_peers_microbatch_fits_in_what_is_free():
    arch = arch_from_preset("qwen2_tiny", yaml.safe_load(LARGE[1].partition("=")[2]), 32000)
    rows = {free: fitting_rows(arch, 2048, 8, free << 30, te=False) for free in (1, 15, 40, 140)}
    assert rows == {1: 1, 15: 1, 40: 4, 140: 8}
    assert fitting_rows(arch, 2048, 8, 40 << 30, te=True) == 8
    assert fitting_rows(arch, 512, 8, 15 << 30, te=False) == 8  # scores grow with the square of the length


def test_a_plan_for_each_new_shape_is_found(monkeypatch):
    """Whatever takes so long; here the bound is below what any call takes."""
    monkeypatch.setattr(gpu_commands, "NEW_SHAPE_S", -1.0)
    with pytest.raises(CheckError, match="a new shape costs"):
        gpu_commands.attention(SimpleNamespace(device="cpu"))


@on_a_cpu
def test_without_a_gpu_it_ends_with_one_line(tmp_path, capsys):
    assert accept("--output_dir", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert "torch sees no CUDA device" in said.err and len(said.err.splitlines()) == 1 and said.out == ""
    assert not (tmp_path / "out").exists()


def test_unknown_checks_are_refused(tmp_path, capsys):
    assert accept("--device", "cpu", "--output_dir", tmp_path / "out", "--checks", "partiy") == 2
    assert "unknown check 'partiy'" in capsys.readouterr().err


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


class Recaptures(NativeEngine):
    """It captures a graph in each call."""

    def stats(self):
        return super().stats() | {"captured_graphs": 1.0}


def _bend_a_norm(bench):
    tensors = bench.trainer.actor.named_tensors()
    tensors[next(name for name in tensors if "norm" in name)].mul_(1.01)


def _bring_others(bench):
    bring, policy = bench.trainer.actor.onload, bench.trainer.actor

    def bring_and_spoil(*parts):
        bring(*parts)
        next(policy.chunks[0].parameters()).data[0, 0] += 1

    policy.onload = bring_and_spoil


def _mix_up_prompts(bench):
    """Those that share a prompt see it without its first token."""
    schedule = bench.trainer.actor._forward_backward
    lay = schedule._packed

    def laid(*given, **options):
        packed = lay(*given, **options)
        if packed.prefix_mask is not None:
            runs = packed.prefix_mask
            runs.first_R[runs.first_R < runs.begin_R] += 1
        else:
            packed.keys.row_S[packed.keys.row_S == 0] = 1  # nothing is compiled here: the second one's in its place
        return packed

    schedule._packed = laid


def _skip_the_update(bench):
    update = bench.trainer.actor.update
    bench.trainer.actor.update = lambda *given: update(*given) | {"actor/grad_norm": 0.0}


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
    "graphs of every step": ("cycles", {"rollout.name": f"{__name__}:Recaptures"}, None),
    "weights that come back as others": ("offload", {}, _bring_others),
}
"""What is looked at -> its check, settings, and the fault that is planted."""

SAID = {
    "keys of the wrong prompt": "log-probabilities: ",
    "a bent norm": "log-probabilities: ",
    "a gradient of nothing": "gradient: 1 from transformers",
    "an engine that forgets": "the engine's responses changed",
    "graphs of every step": "CUDA graphs were captured again",
    "weights that come back as others": "the restored weights have checksum",
}


def looked_at(folder, models):
    """What each check says, with and without faults; and the facts of the update's speed."""
    from mrl.distributed import launch
    from mrl.megatron import parallel_state

    parallel_state.destroy()
    launch.shutdown_distributed()
    said = {}
    for what, (check, settings, fault) in ASKED.items():
        own = [f"{key}={value}" for key, value in settings.items()]
        said[what] = _said(check, folder, [*models[CHECKS[check].model], *CHECKS[check].settings, *own], fault)
    facts = _said("update", folder, models["dense"], None)
    launch.init_distributed("cpu", num_threads=1)
    return said, facts


def _said(check, folder, overrides, fault):
    spec = Spec(
        config=f"{folder}/config.yaml", overrides=[*overrides, f"run.output_dir={folder}/run"], checks=[check],
        lines="", folder=folder, module="acceptance.gpu_checks", tools=str(ROOT / "tools"),
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


@pytest.mark.slow
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
