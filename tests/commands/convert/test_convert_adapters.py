"""Adapters in conversions: a PEFT folder with its model, and the checkpoint of a run that has adapters only."""

import json
import pickle

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats import merged_source
from mrl.checkpoint.formats.adapter_checkpoint import AdapterCheckpoint
from mrl.checkpoint.formats.hf import HfSource
from mrl.checkpoint.formats.merged_source import MergedSource
from mrl.checkpoint.formats.peft import WEIGHTS, PeftFolder
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.commands.convert.converters import CONVERTERS
from mrl.config.config import LoraConfig
from mrl.config.peft_folder import ADAPTER_CONFIG
from mrl.errors import UserError
from mrl.models.hf_config import family_of
from mrl.models.presets import arch_from_preset
from tests.checkpoint.formats.test_hf import write_folder
from tests.commands.convert.adapter_jobs import adapters_saved
from tests.megatron.actors import ARCHS, EXPERT_LAYOUTS, LAYOUTS, MIXTURES, VOCAB
from tests.ranks import run_ranks

DENSE = {name: ARCHS[name] for name in ("llama", "qwen2", "qwen3")} | {
    "phi3": arch_from_preset("phi3_tiny", {}, VOCAB),
}
LORA = LoraConfig(rank=4, alpha=8.0)
TP2_PP2 = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)


def convert(name, *arguments):
    return CONVERTERS[name].run(name, [str(each) for each in arguments], "test")


def folders(model, out):
    return "--model_dir", model, "--output_dir", out


def weights_of(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def hf_model(arch, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def save(model, folder, **settings):
    """Saves the model and random adapters of it; returns the model with the adapters."""
    model.save_pretrained(folder / "base")
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**chosen, init_lora_weights=False, task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder / "adapter")
    return adapted


SETTINGS = [
    ("qwen2", {"use_rslora": True}),
    ("qwen3", {"target_modules": ["q_proj", "mlp.up_proj"]}),
    ("llama", {"target_modules": r".*layers\.1.*_proj", "r": 3}),
    ("phi3", {}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_merged_weights_are_those_of_peft(name, settings, tmp_path):
    adapted = save(hf_model(DENSE[name]), tmp_path, **settings)
    adapter = ("--adapter", tmp_path / "adapter")
    assert convert("hf-to-hf", *folders(tmp_path / "base", tmp_path / "out"), *adapter) == 0
    found, before = weights_of(tmp_path / "out"), weights_of(tmp_path / "base")
    expected = adapted.merge_and_unload().state_dict()
    changed = {key for key in found if not torch.equal(found[key], before[key])}
    assert {key for key in before if not torch.equal(before[key], expected[key])} == changed != set()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-6)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(read.state_dict()[min(changed)], found[min(changed)])


def test_bfloat16_is_rounded_once(tmp_path):
    adapted = save(hf_model(DENSE["qwen2"], torch.bfloat16), tmp_path, r=8)
    for dtype in ("bfloat16", "float32"):
        arguments = (*folders(tmp_path / "base", tmp_path / dtype), "--adapter", tmp_path / "adapter")
        assert convert("hf-to-hf", *arguments, "--dtype", dtype) == 0
    half, single = weights_of(tmp_path / "bfloat16"), weights_of(tmp_path / "float32")
    exact = adapted.double().merge_and_unload().state_dict()
    for key, tensor in single.items():
        torch.testing.assert_close(tensor.double(), exact[key], rtol=1e-6, atol=1e-6)
        assert torch.equal(half[key], tensor.bfloat16()), key
    assert any(not torch.equal(half[key].float(), single[key]) for key in single)


TARGETS = {
    "megatron": ("hf-to-megatron", TP2_PP2),
    "trtllm": ("hf-to-trtllm", ("--tp_size", 4)),
    "workers": ("hf-to-megatron", (*TP2_PP2, "--num_workers", 2)),
}


@pytest.mark.parametrize("target", ["megatron", "trtllm", pytest.param("workers", marks=pytest.mark.slow)])
def test_every_target_has_the_same_values(target, tmp_path, monkeypatch, capsys):
    if target != "workers":
        monkeypatch.setattr(merged_source, "_BLOCK", (24, 20))  # blocks that no rank's part begins with
    save(hf_model(DENSE["qwen2"]), tmp_path)
    changed_config(base_model_name_or_path="someone/model")(tmp_path / "adapter")
    name, layout = TARGETS[target]
    adapter = ("--adapter", tmp_path / "adapter")
    assert convert(name, *folders(tmp_path / "base", tmp_path / "out"), *layout, *adapter) == 0
    assert "someone/model" in capsys.readouterr().err
    assert convert("verify", tmp_path / "base", tmp_path / "out", *adapter) == 0
    assert convert("verify", tmp_path / "base", tmp_path / "out") == 1
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["source"]["adapter"]["rank"] == 4
    for file in (ADAPTER_CONFIG, WEIGHTS):
        path = tmp_path / "adapter" / file
        assert manifest["source"]["files"][str(path.resolve())]["xxh3"] == xxh3_file(path)


def test_other_adapters_are_other_work(tmp_path):
    save(hf_model(DENSE["qwen2"]), tmp_path)
    arguments = (*folders(tmp_path / "base", tmp_path / "out"), "--adapter", tmp_path / "adapter")
    assert convert("hf-to-hf", *arguments) == convert("hf-to-hf", *arguments) == 0
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(UserError, match="not made by this command"):
        convert("hf-to-hf", *arguments)


def changed_config(**changes):
    def change(folder):
        found = json.loads((folder / ADAPTER_CONFIG).read_text())
        (folder / ADAPTER_CONFIG).write_text(json.dumps(found | changes))

    return change


def renamed(old, new):
    def change(folder):
        found = load_file(folder / WEIGHTS)
        save_file({name.replace(old, new): tensor for name, tensor in found.items()}, folder / WEIGHTS)

    return change


def without_one(folder):
    found = load_file(folder / WEIGHTS)
    found.pop(min(found))
    save_file(found, folder / WEIGHTS)


WRONG = {
    "dora": (changed_config(use_dora=True), "use_dora"),
    "rank pattern": (changed_config(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "embeddings": (changed_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "layer replication": (changed_config(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    "bias": (changed_config(lora_bias=True), "lora_bias"),
    "no rank": (changed_config(r="4"), "r='?4"),
    "no alpha": (changed_config(lora_alpha=None), "lora_alpha"),
    "rslora": (changed_config(use_rslora="yes"), "use_rslora"),
    "another rank": (changed_config(r=5), "rank than r"),
    "another family": (renamed("self_attn", "attention"), "unexpected tensors"),
    "no projection": (renamed("model.layers", "transformer.h"), "no adapters of a qwen2 model"),
    "half a pair": (without_one, "lacks 1 tensors"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "no config": (lambda folder: (folder / ADAPTER_CONFIG).unlink(), ADAPTER_CONFIG),
}


@pytest.mark.parametrize("what", WRONG)
def test_adapters_that_cannot_be_merged_are_refused(what, tmp_path):
    save(hf_model(DENSE["qwen2"]), tmp_path)
    change, part = WRONG[what]
    change(tmp_path / "adapter")
    with pytest.raises(UserError, match=part):
        convert(
            "hf-to-hf", *folders(tmp_path / "base", tmp_path / "out"), "--adapter", tmp_path / "adapter", "--dry_run"
        )


def test_adapters_of_a_model_of_other_sizes_are_refused(tmp_path):
    save(hf_model(DENSE["qwen2"]), tmp_path)
    wider = arch_from_preset("qwen2_tiny", {"intermediate_size": 96}, VOCAB)
    (tmp_path / "other").mkdir()
    write_folder(wider, tmp_path / "other")
    with pytest.raises(UserError, match="other sizes"):
        convert("hf-to-hf", *folders(tmp_path / "other", tmp_path / "out"), "--adapter", tmp_path / "adapter")


CHECKPOINTS = [
    ("qwen2", LAYOUTS["tp2_pp2"], {}),
    ("qwen2_moe", LAYOUTS["single"], {"dtype": "bfloat16"}),
    ("qwen3", LAYOUTS["single"], {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank": 3}),
    ("qwen2_untied", LAYOUTS["tp2"], {"exclude_modules": ["layers.1.mlp.down_proj"]}),
    ("qwen2_moe", EXPERT_LAYOUTS["tp2_ep2_etp2"], {}),
    ("qwen2_moe", EXPERT_LAYOUTS["tp2_ep2_etp2"], {"share_expert_adapters": True}),
    ("qwen3_moe", EXPERT_LAYOUTS["ep2_pp2"], {"target_modules": ["up_proj", "v_proj"]}),
]


@pytest.mark.parametrize(("name", "grid", "settings"), CHECKPOINTS, ids=str)
def test_a_checkpoint_of_adapters_becomes_what_the_run_would_export(name, grid, settings, tmp_path):
    arch = {**ARCHS, **MIXTURES}[name]
    lora = LoraConfig(**{"rank": 4, "alpha": 8.0, **settings})
    dtype = lora.dtype or "float32"
    (tmp_path / "step").mkdir()
    base, adapters, merged = run_ranks(
        grid.world_size, adapters_saved, tmp_path / "step" / "actor", arch, grid, lora, dtype
    )[0]
    (tmp_path / "base").mkdir()
    write_folder(arch, tmp_path / "base", {key: tensor.contiguous() for key, tensor in base.items()})
    given = ("--base", tmp_path / "base")
    assert convert("megatron-to-peft", *folders(tmp_path / "step", tmp_path / "adapter"), *given) == 0
    found = load_file(tmp_path / "adapter" / WEIGHTS)
    assert found.keys() == adapters.keys()
    assert all(torch.equal(found[key], adapters[key]) for key in adapters)
    config = peft.LoraConfig.from_pretrained(tmp_path / "adapter")
    assert (config.r, config.base_model_name_or_path) == (lora.rank, str(tmp_path / "base"))
    assert convert("megatron-to-hf", *folders(tmp_path / "step", tmp_path / "hf"), *given, "--dtype", dtype) == 0
    for key, tensor in weights_of(tmp_path / "hf").items():
        torch.testing.assert_close(tensor.float(), merged[key], rtol=1e-6, atol=1e-6)
    tolerance = ("--rtol", 2**-8) if dtype == "bfloat16" else ()
    assert convert("verify", tmp_path / "step", tmp_path / "hf", *given, *tolerance) == 0
    assert convert("verify", tmp_path / "base", tmp_path / "hf", "--adapter", tmp_path / "adapter", *tolerance) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run's checkpoint and its model, in bfloat16; the folder of the model is float32, as the run read it."""
    folder = tmp_path_factory.mktemp("adapters")
    grid, arch = LAYOUTS["tp2"], ARCHS["qwen2"]
    base, *_ = run_ranks(2, adapters_saved, folder / "actor", arch, grid, LORA, "bfloat16")[0]
    (folder / "base").mkdir()
    write_folder(arch, folder / "base", {key: tensor.float().contiguous() for key, tensor in base.items()})
    return folder


def test_the_model_may_have_a_wider_dtype_than_the_run(checkpoint, tmp_path):
    assert convert("megatron-to-hf", *folders(checkpoint, tmp_path / "hf"), "--base", checkpoint / "base") == 0
    with HfSource(checkpoint / "base") as base:
        merged = MergedSource(base, AdapterCheckpoint(checkpoint))
        sent = pickle.loads(pickle.dumps(merged))
    name = "model.layers.0.mlp.down_proj.weight"
    region = ((1, 3), (2, 9))
    assert torch.equal(sent.read(name, region), weights_of(tmp_path / "hf")[name][1:3, 2:9])
    assert convert("megatron-to-peft", *folders(checkpoint, tmp_path / "adapter")) == 0
    assert json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] is None
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter" / WEIGHTS).values()} == {torch.bfloat16}
    with pytest.raises(UserError, match="exists already"):
        convert("megatron-to-peft", *folders(checkpoint, tmp_path / "adapter"))


def test_a_checkpoint_of_adapters_needs_its_model(checkpoint, tmp_path):
    for name in ("megatron-to-hf", "megatron-to-trtllm"):
        with pytest.raises(UserError, match=r"--base .*checkpoint\.export_hf.* hf/ and adapter/"):
            convert(name, *folders(checkpoint, tmp_path / "out"))
    with pytest.raises(UserError, match="only low-rank adapters"):
        convert("inspect", checkpoint)
    (tmp_path / "other").mkdir()
    changed = load_file(checkpoint / "base" / "model.safetensors")
    changed["model.norm.weight"][0] += 1
    write_folder(ARCHS["qwen2"], tmp_path / "other", changed)
    for name in ("megatron-to-hf", "megatron-to-peft"):
        with pytest.raises(UserError, match="checksum"):
            convert(name, *folders(checkpoint, tmp_path / "out"), "--base", tmp_path / "other")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rank": true, "scale": 2}', "\x00"])
def test_broken_settings_of_a_checkpoint_are_refused(content, checkpoint):
    path = checkpoint / "actor" / "adapters.json"
    before = path.read_text()
    try:
        path.write_text(content)
        with pytest.raises(UserError, match=r"adapters\.json"):
            AdapterCheckpoint(checkpoint)
        path.write_text(json.dumps(json.loads(before) | {"rank": 5}))
        with pytest.raises(UserError, match="rank"):
            AdapterCheckpoint(checkpoint)
    finally:
        path.write_text(before)


def test_all_weights_need_no_model(tmp_path):
    save(hf_model(DENSE["qwen2"]), tmp_path)
    assert convert("hf-to-megatron", *folders(tmp_path / "base", tmp_path / "megatron")) == 0
    with pytest.raises(UserError, match="has all weights"):
        convert("megatron-to-hf", *folders(tmp_path / "megatron", tmp_path / "hf"), "--base", tmp_path / "base")


def test_adapters_in_place_of_a_model_are_told_the_flag(tmp_path):
    save(hf_model(DENSE["qwen2"]), tmp_path)
    for name, *arguments in (
        ("hf-to-hf", *folders(tmp_path / "adapter", tmp_path / "out")),
        ("inspect", tmp_path / "adapter"),
    ):
        with pytest.raises(UserError, match="--adapter"):
            convert(name, *arguments)


def test_a_folder_of_any_kind_of_target_modules_is_read(tmp_path):
    for number, targets in enumerate(("all-linear", ["q_proj"], r".*layers\.0.*(up|down)_proj")):
        (tmp_path / str(number)).mkdir()
        adapted = save(hf_model(DENSE["qwen2"]), tmp_path / str(number), target_modules=targets)
        expected = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
        found = PeftFolder(tmp_path / str(number) / "adapter", DENSE["qwen2"])
        assert found.describe()["modules"] == len(expected)


def test_paths_of_any_length_can_be_read(tmp_path):
    long = tmp_path / ("a" * 120) / ("b" * 120)
    long.mkdir(parents=True)
    save(hf_model(DENSE["qwen2"]), long)
    assert convert("hf-to-hf", *folders(long / "base", tmp_path / "out"), "--adapter", long / "adapter") == 0
