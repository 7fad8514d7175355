"""`mrl rehearse`: every production config passes, small but whole; mistakes end it with a message to act on."""

import ast
import json
import shutil

import pytest
from rich.console import Console

from mrl.commands.cli import main
from mrl.commands.rehearse.rehearse import FIRST, RESUME, Options, rehearse
from mrl.commands.rehearse.report import FILE
from mrl.commands.rehearse.stages import STAGE_OF_FUNCTION, STAGES, seconds_by_stage, stage_of
from mrl.config.config import ParallelConfig, load
from mrl.distributed.local_ranks import RankError, fork_server_context
from mrl.errors import UserError
from mrl.observability.hardware import HARDWARE
from mrl.trainer.run_plan import resolve
from tests import ranks
from tests.data.folders import byte_bpe_folder
from tests.source import ROOT, modules, tree_of

pytestmark = pytest.mark.slow

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
OF_VLLM = [name for name in CONFIGS if "_vllm" in name]
OF_NATIVE = [name for name in CONFIGS if name.endswith("_native")]
ALONE = [name for name in CONFIGS if name not in (*OF_VLLM, *OF_NATIVE) and not name.startswith("sums_smollm2")]
"""Configs of the other engines; those of `sums_smollm2` need the folder of its model."""
OF_ROLES = [name for name in CONFIGS if name.endswith("_roles")]
NAMED = ("grpo_qwen2.5-0.5b", "grpo_qwen3-8b", "grpo_llama3.1-70b", "dapo_qwen3-30b", "dapo_qwen3-235b")
SMALL, DENSE, STAGED, EXPERTS, LARGE = (
    name for start in NAMED for name in ALONE if name.startswith(start) and name not in OF_ROLES
)

OVER_MPI = (
    STAGED, EXPERTS, LARGE, *(name for name in ALONE if name.startswith("gspo") or name in OF_ROLES)
)  # fmt: skip

OF_EIGHT = (STAGED, LARGE, *(name for name in ALONE if name in OF_ROLES))
"""Whose every dimension is two only then; four ranks are enough for those of the others."""

LIMIT_S = 240
MAX_GB = 4
LAYOUTS = {
    EXPERTS: {"tensor parallel", "data parallel", "expert parallel", "rollout expert parallel"},
    LARGE: {"tensor parallel", "pipeline parallel", "expert parallel", "rollout expert parallel"},
    STAGED: {"tensor parallel", "pipeline parallel", "data parallel", "rollout tensor parallel"},
    DENSE: {"tensor parallel", "data parallel", "rollout replicas"},
}


@pytest.fixture(scope="module", autouse=True)
def server():
    """The one of this process imports what all tests need, not this file alone."""
    fork_server_context(ranks.PRELOAD)


def options(folder, **changes):
    given = {"max_ranks": 8, "output_dir": str(folder / "out"), "timeout_s": LIMIT_S, **changes}
    return Options(HARDWARE["h100"], **given)


def run(folder, name, *overrides, **changes):
    """The report as rehearsal.json has it."""
    file = CONFIGS.get(name, name)
    rehearse(str(file), list(overrides), options(folder, **changes), Console(quiet=True))
    return json.loads((folder / "out" / FILE).read_text())


def refused(folder, name, *overrides, **changes):
    with pytest.raises(UserError) as error:
        run(folder, name, *overrides, **changes)
    assert json.loads((folder / "out" / FILE).read_text())["passed"] is False
    return str(error.value)


@pytest.mark.parametrize("name", ALONE)
def test_every_config_passes_with_its_structure_kept(name, tmp_path):
    report = run(tmp_path, name, max_ranks=8 if name in OF_EIGHT else 4)
    outcomes = {stage["name"]: stage["outcome"] for stage in report["stages"]}
    assert list(outcomes) == ["check", *STAGES, "resume", "to Hugging Face", "to TensorRT-LLM"]
    assert report["passed"] and set(outcomes.values()) == {"passed"} and report["warnings"] == []
    for dimension in LAYOUTS.get(name, ()):
        asked, used = report["layout"][dimension]
        assert asked > 1 and used > 1
    assert all(used > 1 for asked, used in report["layout"].values() if asked > 1)
    assert report["peak_bytes"] < MAX_GB * 1e9 and report["metrics"]["actor/grad_norm"] > 0
    assert (
        report["metrics"]["step"] == 2 and (tmp_path / "out" / "converted" / "tensorrt_llm" / "config.json").is_file()
    )
    assert "CUDA kernels" in str(report["not_covered"]) and not ranks_left()
    assert ("launch/mpirun.sh" in str(report["not_covered"])) == (name in OVER_MPI)
    assert ("tool calls" in str(report["not_covered"])) == ("num_turns/mean" in report["metrics"])
    assert ("only sample" in report["layout"]) == (name in OF_ROLES)
    if name in OF_ROLES:
        assert report["metrics"]["refit/bytes_local"] == 0 and "of their own" in str(report["stages"][1])
    if name == "guessing":
        assert report["metrics"]["num_turns/mean"] > 1 and "turns of at most" in str(report["stages"])


@pytest.mark.parametrize("name", OF_NATIVE)
def test_a_config_of_a_model_that_tensorrt_llm_lacks_passes_without_the_conversion_to_it(name, tmp_path):
    report = run(tmp_path, name)
    outcomes = {stage["name"]: stage["outcome"] for stage in report["stages"]}
    assert outcomes.pop("to TensorRT-LLM") == "not covered"
    assert report["passed"] and set(outcomes.values()) == {"passed"} and report["warnings"] == []
    assert all(used > 1 for asked, used in report["layout"].values() if asked > 1)
    assert report["metrics"]["step"] == 2 and report["metrics"]["actor/grad_norm"] > 0


@pytest.mark.parametrize("name", OF_VLLM)
def test_a_config_of_vllm_is_checked_and_shrunk_where_vllm_is_not_installed(name, tmp_path, monkeypatch):
    """Its run with vLLM is in `tests/engines/vllm/test_rehearsal.py`, one with mrl's engine that of its like above."""
    monkeypatch.setattr("mrl.engines.vllm.package_signature.installed", lambda: None)
    report = run(tmp_path, name, dry_run=True)
    assert report["passed"] and report["warnings"] == [] and report["engine"] == "native"
    assert all(used > 1 for asked, used in report["layout"].values() if asked > 1)
    assert 'the native engine sampled instead, since its CPU build is not installed: pip install -e ".[' in str(
        report["not_covered"]
    )


def ranks_left():
    """Ranks are children of the server of forks, which lives on."""
    return [rank for rank in ranks.SERVER.children() if rank.pid not in ranks.pids()]


MISTAKES = {
    "heads and TP": (
        DENSE,
        ["parallel.tensor_model_parallel_size=3", "rollout.tensor_model_parallel_size=3"],
        9,
        "does not divide the model's attention heads",
    ),
    "key/value heads and TP": (
        DENSE,
        ["model.overrides={num_attention_heads: 36, num_key_value_heads: 4}", "parallel.tensor_model_parallel_size=6"],
        12,
        "4 key/value heads: one must be a multiple of the other",
    ),
    "experts and EP": (EXPERTS, ["parallel.expert_model_parallel_size=6"], 24, "does not divide the model's experts"),
    "batch and minibatch": (STAGED, ["train.minibatch_size=48"], None, "train.minibatch_size=48 does not divide"),
    "minibatch and DP": (SMALL, ["train.minibatch_size=1", "rollout.n=2"], 4, "some ranks would never train"),
    "VPP and layers": (
        STAGED,
        ["parallel.virtual_pipeline_model_parallel_size=40"],
        None,
        "virtual_pipeline_model_parallel_size=40 does not divide the model's 80 layers",
    ),
    "uneven stages": (
        LARGE,
        ["parallel.num_layers_in_first_pipeline_stage=10"],
        None,
        "73 layers are left for 6 stages",
    ),
    "long rollout": (DENSE, ["rollout.max_model_len=4096"], None, "rollout.max_model_len=4096 is below"),
    "reward that does not import": (SMALL, ["reward.functions[0].name=nowhere.rewards:f"], None, "does not import"),
    "unknown key": (SMALL, ["rollout.temprature=0.7"], None, "Did you mean 'rollout.temperature'?"),
    "rollout TP and ranks": (DENSE, ["rollout.tensor_model_parallel_size=16"], None, "does not divide the 8 rank(s)"),
    "world size": (STAGED, [], 60, "Start a multiple of 32 ranks"),
    "data file": (SMALL, ["~data", "data.train_files=nowhere.jsonl"], None, "'nowhere.jsonl' does not exist"),
    "row without answer": (
        SMALL,
        ["~data", "data.train_files={rows}", "train.eval_interval=0"],
        None,
        "no column 'answer'",
    ),
    "tokenizer": (SMALL, ["model.tokenizer=nowhere"], None, "model.tokenizer: 'nowhere' is not a folder"),
    "tokenizer's characters": (SMALL, ["model.tokenizer=char:0123456789#"], None, "does not know '<'"),
    "SP without TP": (SMALL, ["parallel.sequence_parallel=true"], None, "needs parallel.tensor_model_parallel_size"),
    "microbatch": (SMALL, ["actor.max_tokens_per_microbatch=1000"], None, "a sequence is never split"),
    "context parallelism": (
        EXPERTS,
        ["parallel.context_parallel_size=2", "actor.moe_token_dispatcher_type=allgather"],
        None,
        "not pad sequences that are split over ranks to equal lengths. Use alltoall",
    ),
    "run folder": (SMALL, ["run.output_dir={rows}/below"], None, "is a file; expected a folder"),
    "prompts": (SMALL, ["rollout.prompt_length=4"], None, "more than rollout.prompt_length=4. Raise it"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_about_the_real_run_is_told_before_a_rank_starts(mistake, tmp_path):
    name, overrides, world_size, said = MISTAKES[mistake]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "solution": "2"}\n')
    overrides = [text.replace("{rows}", str(rows)) for text in overrides]
    message = refused(tmp_path, name, *overrides, world_size=world_size)
    assert message.startswith("the rehearsal failed in its stage 'check': ") and said in message
    assert [path.name for path in (tmp_path / "out").iterdir()] == [FILE]


REWARDS = """
def raises(*, prompt, response, answer, extra):
    raise RuntimeError("no judge at port 80")

def is_nan(*, prompt, response, answer, extra):
    return float("nan")
"""


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_the_rehearsal.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "rewards_of_the_rehearsal"


@pytest.mark.parametrize(
    ("function", "said"), [("raises", "RuntimeError: no judge at port 80"), ("is_nan", "it returned nan")]
)
def test_a_reward_that_fails_at_run_time_ends_in_its_stage(function, said, tmp_path, my_rewards):
    message = refused(tmp_path, SMALL, f"reward.functions[0].name={my_rewards}:{function}")
    assert message.startswith("the rehearsal failed in its stage 'reward': ")
    assert said in message and "reward.max_failed_frac" in message and "(step 0, testing/reward)" in message
    assert [stage["outcome"] for stage in json.loads((tmp_path / "out" / FILE).read_text())["stages"]] == [
        "passed",
        "failed",
    ]


def model_folder(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    byte_bpe_folder(folder)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **sizes, **heads)).save_pretrained(str(folder))


CHAT = {"messages": [{"role": "user", "content": "What is two plus two?"}], "label": 4}


def test_a_model_and_data_of_ones_own_are_read_as_a_run_would(tmp_path):
    """Folder, chat template, parquet and JSONL, a reference, an export."""
    import pyarrow
    import pyarrow.parquet

    model_folder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 100)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT] * 9), tmp_path / "val.parquet")
    report = run(
        tmp_path, DENSE, "~model", f"model.path={tmp_path}/model", f"reference.path={tmp_path}/model", "~data",
        f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/val.parquet", "data.answer_key=label",
        "data.prompt_key=messages", "data.overlong_prompts=drop", "checkpoint.export_hf=true",
        "rollout.prompt_length=100", "rollout.response_length=100", "rollout.tensor_model_parallel_size=2",
        world_size=4, max_ranks=2,
    )  # fmt: skip
    assert report["passed"] and report["ranks"] == [2, 2]
    assert [line.split(" is ")[0] for line in report["warnings"]] == ["data parallel 2", "rollout replicas 2"]
    assert report["settings"]["rollout.prompt_length"][1] > 16  # of the data's prompts under the template
    out = tmp_path / "out"
    assert len((out / "data" / "train-0.jsonl").read_text().splitlines()) == 64
    assert (out / "run" / "checkpoints" / "step-00000002" / "hf" / "tokenizer.json").is_file()
    repeated = load(out / FIRST)
    assert repeated.model.path == str(out / "model") and repeated.reference.path == str(out / "reference")


def test_weights_that_are_not_the_models_are_told_and_weights_elsewhere_are_not_needed(tmp_path):
    model_folder(tmp_path / "model")
    (tmp_path / "config").mkdir()
    for file in (tmp_path / "model").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / "config")
    short = ("rollout.prompt_length=100", "rollout.response_length=100", "~model", "data.overlong_prompts=drop")
    report = run(tmp_path, SMALL, *short, f"model.path={tmp_path}/config", dry_run=True)
    assert report["passed"] and "has no safetensors files on this machine" in report["warnings"][0]
    changed = json.loads((tmp_path / "model" / "config.json").read_text()) | {"intermediate_size": 640}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    message = refused(tmp_path, SMALL, *short, f"model.path={tmp_path}/model", dry_run=True)
    assert "has shape [512, 256], but config.json requires [640, 256]" in message


def test_files_of_the_cluster_are_told_and_something_stands_in_where_the_user_says_so(tmp_path):
    elsewhere = ("~model", "model.path=/models/Qwen2.5-0.5B", "~data", "data.train_files=/data/train.jsonl")
    message = refused(tmp_path, SMALL, *elsewhere)
    assert "model folder '/models/Qwen2.5-0.5B' does not exist" in message
    assert "(model.path, data.train_files), add --stand-ins" in message
    report = run(tmp_path, SMALL, *elsewhere, "train.eval_interval=0", stand_ins=True)
    assert report["passed"] and "preset qwen2.5_0.5b is used" in report["warnings"][0]
    assert report["model"]["num_layers"] == [24, 2]


def test_a_run_that_plan_refuses_is_rehearsed_and_ends_with_the_reason_and_the_status_of_plan(tmp_path, capsys):
    arguments = [str(CONFIGS[SMALL]), "actor.max_tokens_per_microbatch=1000000"]
    assert main(["plan", *arguments]) == 2
    reason = capsys.readouterr().err.removeprefix("mrl: error: ").strip()
    assert main(["rehearse", *arguments, "--output-dir", str(tmp_path / "out"), "--dry-run"]) == 2
    assert reason in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / FILE).read_text())
    assert report["plan_refuses"] == reason and report["finished"] and not report["passed"]


def test_a_rehearsal_ends_in_time_and_leaves_no_rank(tmp_path):
    message = refused(tmp_path, SMALL, timeout_s=0.1)
    assert "did not end in time: rank 0 in " in message and not ranks_left()


def test_a_folder_that_is_not_a_rehearsals_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not an earlier rehearsal's output"):
        run(tmp_path, SMALL)
    assert (tmp_path / "out" / "thesis.tex").is_file()


def test_the_shrunk_config_keeps_what_it_does_not_have_to_shrink(tmp_path):
    overrides = ("actor.weight_decay=0.1", "algorithm.rollout_correction.rollout_is_threshold=2.5")
    report = run(tmp_path, LARGE, *overrides, dry_run=True)
    small = load(tmp_path / "out" / FIRST)
    assert small.actor.weight_decay == 0.1 and small.actor.recompute == "full" and small.actor.param_offload
    assert small.actor.router_replay == "recompute"
    acting = small.algorithm.rollout_correction.resolved
    assert small.algorithm.name == "dapo" and acting.rollout_is_threshold == "2.5" and not acting.bypass_mode
    assert small.model.dtype == "bfloat16"
    assert small.algorithm.overlong.buffer_length == 2 and small.rollout.response_length == 8
    assert small.parallel.num_layers_in_first_pipeline_stage == 1 and small.parallel.expert_tensor_parallel_size == 1
    assert report["settings"]["rollout.response_length"] == [8192, 8]
    assert load(tmp_path / "out" / RESUME).parallel == ParallelConfig()


SETTINGS = {
    "supervised": (SMALL, ["algorithm.name=sft", "train.minibatch_size=null"]),
    "no minibatches": (SMALL, ["actor.lr_schedule=linear", "train.minibatch_size=null", "actor.ppo_epochs=4"]),
    "chunks": (SMALL, ["rollout.max_num_batched_tokens=128", "rollout.max_model_len=2000"]),
    "warm start alone": (SMALL, ["train.num_steps=0", "train.warm_start={num_steps: 100, lr_warmup_steps: 5}"]),
    "best checkpoints": (SMALL, ["checkpoint={interval: 5, keep_best: 3}", "algorithm.dynamic_sampling=true"]),
    "loss norm": (
        SMALL,
        ["algorithm.loss_aggregation=seq_mean_token_sum_norm", "algorithm.loss_norm_length=1000", "run.max_time_s=60"],
    ),
    "one last stage": (
        DENSE,
        ["parallel.pipeline_model_parallel_size=2", "parallel.num_layers_in_last_pipeline_stage=16"],
    ),
    "virtual pipeline": (
        STAGED,
        ["parallel.virtual_pipeline_model_parallel_size=5", "parallel.context_parallel_size=2"],
    ),
    "another engine": (STAGED, ["rollout.name=trtllm", "actor.optimizer_offload=true"]),
    "cut experts": (
        EXPERTS,
        [
            "parallel={expert_model_parallel_size: 4, expert_tensor_parallel_size: 2}",
            "rollout={expert_parallel_size: 2, moe_tensor_parallel_size: 2}",
        ],
    ),
    "Megatron's own fields": (
        LARGE,
        [
            "actor={recompute: none, moe_token_dispatcher_type: flex, overlap_grad_reduce: true}",
            "megatron.transformer={moe_permute_fusion: true, moe_deepep_num_sms: 24, "
            "recompute_granularity: selective, recompute_modules: [layernorm, core_attn, moe], "
            "deallocate_pipeline_outputs: false}",
            "megatron.ddp={overlap_param_gather: true, bucket_size: 100000000}",
        ],
    ),
    "allgather": (EXPERTS, ["actor.moe_token_dispatcher_type=allgather", "parallel.expert_tensor_parallel_size=null"]),
    "adapters": (
        DENSE,
        [
            "actor.lora.rank=32",
            "actor.lora.target_modules=[layers.30.mlp.up_proj, q_proj]",
            "actor.lora.exclude_modules=[layers.3.self_attn.q_proj]",
        ],
    ),
    "adapters of experts": (EXPERTS, ["actor.lora={rank: 32, exclude_modules: [o_proj]}"]),
    "uneven virtual pipeline": (
        LARGE,
        [
            "parallel.virtual_pipeline_model_parallel_size=2",
            "parallel={num_layers_in_first_pipeline_stage: 10, num_layers_in_last_pipeline_stage: 12}",
        ],
    ),
}


@pytest.mark.parametrize("max_ranks", [8, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_other_settings_shrink_to_a_run_that_mrl_allows(setting, max_ranks, tmp_path):
    name, overrides = SETTINGS[setting]
    world_size = 64 if name in (EXPERTS, STAGED) else None
    report = run(tmp_path, name, *overrides, max_ranks=max_ranks, world_size=world_size, dry_run=True)
    assert report["passed"] and [stage["name"] for stage in report["stages"]] == ["check"]
    used = report["layout"]["all"][1]
    assert used <= max_ranks and not (tmp_path / "out" / "logs-first").exists()
    resolve(load(tmp_path / "out" / FIRST), used)


def test_what_only_gpus_have_of_megatrons_fields_is_left_out_and_told(tmp_path):
    fields = "megatron.transformer={moe_permute_fusion: true, bias_dropout_fusion: true, softmax_scale: 0.1}"
    flex = "actor={moe_token_dispatcher_type: flex, transformer_impl: te}"
    report = run(tmp_path, EXPERTS, fields, flex, "megatron.unchecked=true", world_size=64, dry_run=True)
    told = "\n".join(report["not_covered"])
    assert "megatron.transformer.moe_permute_fusion: it needs TransformerEngine" in told
    assert "the flex dispatcher: tokens were dispatched by alltoall" in told
    assert "megatron.transformer.softmax_scale is used only because of megatron.unchecked=true" in "\n".join(
        report["warnings"]
    )
    small = load(tmp_path / "out" / FIRST)
    passed = small.megatron.transformer
    assert small.actor.transformer_impl == "auto"
    assert passed == {"bias_dropout_fusion": True, "softmax_scale": 0.1}


@pytest.mark.parametrize(
    ("at", "frames", "stage"),
    [
        ("step 1, gen", [], "rollout"),
        ("step 0, testing/reward", [], "reward"),
        ("", [("train.py", "train"), ("trainer.py", "__init__"), ("policy.py", "__init__")], "build"),
        (
            "",
            [("train.py", "sample_and_score"), ("prompt_assignment.py", "generate"), ("engine.py", "generate")],
            "rollout",
        ),
        ("", [("checkpointing.py", "write"), ("checkpoint.py", "begin"), ("checkpoint.py", "_together")], "checkpoint"),
    ],
)
def test_an_error_has_the_stage_of_its_phase_or_else_of_its_stack(at, frames, stage):
    assert stage_of(RankError("", rank=0, is_mistake=bool(at), at=at, frames=frames)) == stage


def test_each_function_that_names_a_stage_is_one_of_mrl():
    known = {
        (path.name, node.name)
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
    }
    assert set(STAGE_OF_FUNCTION) - known == set()


def test_what_an_evaluation_does_beside_sampling_counts_as_its_refit():
    row = {"timing_s/testing": 3.0, "timing_s/testing/gen": 1.5, "timing_s/testing/reward": 0.5, "timing_s/gen": 2.0}
    assert seconds_by_stage([row]) == {"refit": 1.0, "rollout": 3.5, "reward": 0.5}


def test_the_command_says_what_failed_and_ends_with_2(tmp_path, capsys):
    words = ["rehearse", str(CONFIGS[SMALL]), "train.minibatch_size=7", "--output-dir", str(tmp_path / "out")]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "mrl: error: the rehearsal failed in its stage 'check': train.minibatch_size=7 does not" in printed.err
    assert "loading" in printed.err and "check ..." in printed.out
    assert "failed" in printed.out and "CUDA kernels" in printed.out
