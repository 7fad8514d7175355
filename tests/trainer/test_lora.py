"""Adapters outside the model: initial values, merged weights, PEFT folders in both directions, the reference."""

import json
import math
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.peft import WEIGHTS, read_adapters
from mrl.config.config import LoraConfig, load
from mrl.config.peft_folder import ADAPTER_CONFIG
from mrl.errors import UserError
from mrl.models.hf_config import family_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.lora import adapted_modules, first_expert, num_parameters, peft_layout
from tests.megatron.actors import ARCHS, EXPERT_LAYOUTS, LAYOUTS, make_batch
from tests.ranks import run_ranks
from tests.trainer.lora_ranks import LORA, MODELS, exported, faster, imported, initial, reference


@pytest.mark.parametrize(("name", "grid"), [
    ("qwen2", LAYOUTS["tp2_pp2"]), ("qwen2_untied", LAYOUTS["tp2"]), ("qwen2_moe", EXPERT_LAYOUTS["tp2_ep2_etp2"]),
])  # fmt: skip
@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_initial_adapters_do_not_depend_on_the_layout(name, grid, init):
    lora = LoraConfig(rank=4, init=init)
    found = run_ranks(grid.world_size, initial, name, grid, lora, 3)[0]
    expected = run_ranks(1, initial, name, ParallelLayout(1), lora, 3)[0]
    assert found.keys() == expected.keys() and len(found) == 2 * len(adapted_modules(MODELS[name], lora))
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert len({tensor.flatten()[0].item() for key, tensor in found.items() if "lora_A" in key}) == len(found) // 2


def test_experts_start_with_the_adapters_that_they_share():
    lora = LoraConfig(rank=4, share_expert_adapters=True)
    found = run_ranks(4, initial, "qwen2_moe", EXPERT_LAYOUTS["ep4"], lora, 3)[0]
    expected = run_ranks(1, initial, "qwen2_moe", ParallelLayout(1), lora, 3)[0]
    apart = run_ranks(1, initial, "qwen2_moe", ParallelLayout(1), LoraConfig(rank=4), 3)[0]
    assert found.keys() == expected.keys() == apart.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert all(torch.equal(found[key], apart[first_expert(key)]) for key in found)


@pytest.mark.parametrize(("init", "theirs"), [("kaiming", True), ("gaussian", "gaussian")])
def test_initial_adapters_have_the_distribution_of_pefts(init, theirs):
    lora = LoraConfig(rank=16, init=init)
    found = run_ranks(1, initial, "qwen2", ParallelLayout(1), lora, 3)[0]
    torch.manual_seed(0)
    model = peft.get_peft_model(hf_model(ARCHS["qwen2"]), peft_config(lora, theirs))
    expected = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if "lora_" in name}
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        other = expected[key]
        assert tensor.shape == other.shape
        if "lora_B" in key:
            assert not tensor.any() and not other.any()
        else:
            assert math.isclose(tensor.std(), other.std(), rel_tol=0.15)
            if init == "kaiming":
                bound = 1 / math.sqrt(tensor.size(1))
                assert 0.9 * bound < tensor.abs().max() <= bound and other.abs().max() <= bound


def hf_model(arch, weights=None):
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    if weights is not None:
        found = model.load_state_dict(weights, strict=False)
        assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()
    return model


def peft_config(lora, init=True):
    return peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", init_lora_weights=init, task_type="CAUSAL_LM"
    )


def logprobs_of(model, batch):
    parts, start = [], 0
    for prompt, response in zip(batch.prompt_lens_B.tolist(), batch.response_lens_B.tolist(), strict=True):
        tokens = batch.tokens_P[start : start + prompt + response]
        start += prompt + response
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)[prompt - 1 : -1]
        parts.append(logprobs.gather(1, tokens[prompt:, None]).squeeze(1))
    return torch.cat(parts).detach()


EXPORTS = [
    ("qwen2", "tp2_pp2", LORA),
    ("llama", "single", LoraConfig(rank=4, alpha=8.0, use_rslora=True)),
    ("qwen3", "tp2", LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"])),
    ("qwen3", "dp2", LoraConfig(rank=4, alpha=8.0, exclude_modules=["layers.1.mlp.down_proj"])),
    ("qwen2_untied", "pp2", LoraConfig(rank=4, alpha=8.0, target_modules=["mlp.up_proj"])),
]


@pytest.mark.parametrize(("name", "layout", "lora"), EXPORTS, ids=str)
def test_an_exported_folder_gives_the_same_logprobs_in_peft(name, layout, lora, tmp_path):
    folder = tmp_path / "adapters"
    weights, scored, merged = run_ranks(LAYOUTS[layout].world_size, exported, folder, name, LAYOUTS[layout], lora)[0]
    batch = make_batch()
    model = peft.PeftModel.from_pretrained(hf_model(MODELS[name], weights), folder)
    torch.testing.assert_close(logprobs_of(model, batch), scored, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logprobs_of(hf_model(MODELS[name], merged), batch), scored, rtol=1e-5, atol=5e-5)
    own = model.merge_and_unload()
    for key, tensor in own.named_parameters():
        torch.testing.assert_close(tensor.detach(), merged[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "layout"), [("qwen2", "single"), ("qwen3", "tp2_pp2")])
def test_a_folder_of_peft_gives_the_same_logprobs_here(name, layout, tmp_path):
    model = peft.get_peft_model(hf_model(MODELS[name]), peft_config(LORA, init=False))
    model.save_pretrained(tmp_path / "adapters")
    weights, scored = run_ranks(
        LAYOUTS[layout].world_size, imported, tmp_path / "adapters", name, LAYOUTS[layout], LORA
    )[0]
    read = peft.PeftModel.from_pretrained(hf_model(MODELS[name], weights), tmp_path / "adapters")
    torch.testing.assert_close(logprobs_of(read, make_batch()), scored, rtol=1e-5, atol=2e-5)


CHANGES = {
    "r": ({"r": 5}, "rank"),
    "lora_alpha of a text": ({"lora_alpha": "8"}, "lora_alpha"),
    "lora_alpha": ({"lora_alpha": 5}, "alpha"),
    "use_rslora": ({"use_rslora": True}, "use_rslora"),
    "use_dora": ({"use_dora": True}, "use_dora"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "peft_type": ({"peft_type": "LOHA"}, "peft_type"),
    "bias": ({"bias": "all"}, "bias"),
}


@pytest.fixture
def folder(tmp_path):
    peft.get_peft_model(hf_model(ARCHS["qwen2"]), peft_config(LORA)).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_experts_that_share_adapters_have_equal_copies_in_a_folder(tmp_path):
    lora, grid, folder = (
        LoraConfig(rank=4, alpha=8.0, share_expert_adapters=True),
        EXPERT_LAYOUTS["ep2"],
        tmp_path / "a",
    )
    _, scored, _ = run_ranks(2, exported, folder, "qwen3_moe", grid, lora)[0]
    tensors = load_file(folder / WEIGHTS)
    assert tensors.keys() == peft_layout(MODELS["qwen3_moe"], lora, "float32").keys()
    assert all(torch.equal(tensor, tensors[first_expert(name)]) for name, tensor in tensors.items())
    assert torch.equal(run_ranks(1, imported, folder, "qwen3_moe", ParallelLayout(1), lora)[0][1], scored)
    unshared = replace(lora, share_expert_adapters=False)
    assert torch.equal(run_ranks(1, imported, folder, "qwen3_moe", ParallelLayout(1), unshared)[0][1], scored)
    name = next(name for name in tensors if first_expert(name) != name)
    save_file({**tensors, name: tensors[name] + 1e-3}, folder / WEIGHTS)
    layout = peft_layout(MODELS["qwen3_moe"], lora, "float32")
    with pytest.raises(UserError, match="share_expert_adapters"):
        read_adapters(folder, MODELS["qwen3_moe"], lora, layout, allocate(layout))
    read_adapters(folder, MODELS["qwen3_moe"], unshared, layout, allocate(layout))


@pytest.mark.parametrize(("name", "targets", "part"), [
    ("qwen2", ["all-linear"], "no effect"), ("qwen2_moe", ["q_proj"], "no effect"),
    ("qwen2_moe", ["experts.0.up_proj"], "experts.1.up_proj"),
])  # fmt: skip
def test_sharing_needs_all_experts_of_a_layer(name, targets, part):
    with pytest.raises(UserError, match=part):
        adapted_modules(MODELS[name], LoraConfig(rank=1, target_modules=targets, share_expert_adapters=True))


def read(folder, lora=LORA):
    layout = peft_layout(ARCHS["qwen2"], lora, "float32")
    read_adapters(folder, ARCHS["qwen2"], lora, layout, allocate(layout))


@pytest.mark.parametrize("what", CHANGES)
def test_adapters_that_compute_something_else_are_refused(what, folder):
    read(folder)
    changes, key = CHANGES[what]
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=key):
        read(folder)


def test_a_config_that_names_a_folder_alone_takes_its_settings(folder):
    found = load({"actor": {"lora": {"adapter_path": str(folder)}}}).actor.lora
    assert (found.rank, found.alpha) == (LORA.rank, LORA.alpha) != (LoraConfig().rank, LoraConfig().alpha)
    read(folder, found)
    for key, value in (("rank", 3), ("alpha", 32), ("target_modules", ["q_proj"])):
        with pytest.raises(UserError, match=key):
            read(folder, load({"actor": {"lora": {"adapter_path": str(folder), key: value}}}).actor.lora)


def test_another_spelling_of_the_same_scale_is_taken(folder):
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(
        json.dumps(config | {"lora_alpha": LORA.alpha / math.sqrt(LORA.rank), "use_rslora": True})
    )
    read(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_a_broken_config_is_refused(content, folder):
    (folder / ADAPTER_CONFIG).write_text(content)
    with pytest.raises(UserError, match=ADAPTER_CONFIG):
        read(folder)


def test_other_modules_or_missing_files_are_refused(folder):
    with pytest.raises(UserError, match="target_modules"):
        read(folder, LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj"]))
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=WEIGHTS):
        read(folder)


@pytest.mark.parametrize(("targets", "excluded", "part"), [
    (["w_proj"], [], "w_proj"), (["q_proj"], ["down_proj"], "no effect"), (["q_proj"], ["all-linear"], "all-linear"),
    (["q_proj"], ["q_proj"], "leaves no module"), (["all-linear"], ["lm_head"], "lm_head"),
    ([], [], "leaves no module"),
])  # fmt: skip
def test_modules_that_the_model_lacks_are_refused(targets, excluded, part):
    with pytest.raises(UserError, match=part):
        adapted_modules(ARCHS["qwen2"], LoraConfig(rank=1, target_modules=targets, exclude_modules=excluded))


@pytest.mark.parametrize("targets", [["q_proj"], ["self_attn.o_proj", "down_proj"], ["all-linear"]], ids=str)
def test_the_modules_are_those_that_peft_finds(targets):
    chosen = "all-linear" if targets == ["all-linear"] else targets
    config = peft.LoraConfig(r=2, target_modules=chosen, task_type="CAUSAL_LM")
    model = peft.get_peft_model(hf_model(ARCHS["qwen2"]), config)
    lora = LoraConfig(rank=2, target_modules=targets)
    expected = {
        name.partition(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in model.named_parameters()
        if ".lora_A" in name
    }
    assert set(adapted_modules(ARCHS["qwen2"], lora)) == expected
    assert num_parameters(ARCHS["qwen2"], lora) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("layout", ["single", "tp2_pp2"])
def test_the_reference_is_the_model_without_adapters_and_needs_no_second_copy(layout):
    for plain, live, frozen, followed, size in run_ranks(LAYOUTS[layout].world_size, reference, LAYOUTS[layout], 2):
        torch.testing.assert_close(frozen, plain, rtol=1e-6, atol=1e-6)
        assert (live - plain).abs().max() > 1e-3
        torch.testing.assert_close(followed, live, rtol=1e-6, atol=1e-6)
        assert size <= num_parameters(ARCHS["qwen2"], LORA) + 4096


def test_lora_b_learns_faster_by_the_ratio():
    plain, fast = (run_ranks(1, faster, ratio, 1)[0] for ratio in (1.0, 8.0))
    assert math.isclose(plain["lora_A"], fast["lora_A"], rel_tol=1e-3)
    assert math.isclose(8 * plain["lora_B"], fast["lora_B"], rel_tol=1e-3)
