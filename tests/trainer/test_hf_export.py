"""Real ranks write a Hugging Face folder together; transformers reads it."""

import json

import pytest
import torch
import torch.distributed as dist
import transformers

from mrl.checkpoint.formats.hf import assign_files, load_from_hf
from mrl.data.tokenizer import CharTokenizer, HFTokenizer
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.models.presets import PRESETS, arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.megatron import megatron_layouts
from mrl.trainer.hf_export import export_to_hf
from tests.checkpoint.formats.test_hf import save_model, write_folder
from tests.data.folders import byte_bpe_folder
from tests.ranks import run_ranks
from tests.resharding.archs import ARCHS, counted, small

EXPORTED = {**ARCHS, "experts in one tensor": small("gpt_oss_tiny")}


def exports(folder, arch, grid, like, dtype="float32", **how):
    """Each rank loads its shard from `like` and exports."""
    rank = dist.get_rank()
    layouts = megatron_layouts(arch, grid, dtype="float32", te=False)
    tensors = allocate(layouts[rank])
    load_from_hf(like, arch, layouts[rank], tensors)
    try:
        export_to_hf(folder, arch, layouts, tensors, dtype=dtype, like=like, **how)
    except (UserError, RuntimeError) as error:
        return str(error)
    return "written"


@pytest.mark.parametrize("arch", EXPORTED.values(), ids=EXPORTED)
@pytest.mark.parametrize(
    "grid, how",
    [
        (ParallelLayout(4, 2, 2), {"max_file_bytes": 30_000, "bucket_bytes": 10_000, "writers": (0, 3)}),
        (ParallelLayout(4, 1, 2, 2), {}),
    ],
    ids=["several files, two writers", "one file"],
)
def test_transformers_loads_the_same_tensors_and_computes_the_same(arch, grid, how, tmp_path):
    original = save_model(arch, tmp_path / "in")
    out = tmp_path / "out"
    assert set(run_ranks(4, exports, out, arch, grid, tmp_path / "in", **how)) == {"written"}
    assert (out / "model.safetensors.index.json").exists() == bool(how)
    assert arch_from_folder(out) == arch
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("in", "out")]
    written = models[1].state_dict()
    assert models[1].dtype == torch.float32
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in original.items())
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)


def test_bfloat16_files_hold_the_cast_and_say_so(tmp_path):
    arch = ARCHS["biases, tied"]
    original = save_model(arch, tmp_path / "in")
    run_ranks(4, exports, tmp_path / "out", arch, ParallelLayout(4, 2, 2), tmp_path / "in", "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, original[name].bfloat16()) for name, tensor in model.state_dict().items())


ROOM = 400
"""Tokens to sample: one in about 20 is an end token, so that a sequence without one has a chance of 1e-9."""
LETTERS = CharTokenizer("0123456789+=<>abcd.")


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("_tiny")])
def test_generate_ends_where_mrl_ends(preset, tmp_path):
    """The classes of transformers have end tokens of their own where config.json names none."""
    arch = arch_from_preset(preset, {"num_hidden_layers": 2}, LETTERS.vocab_size)
    tensors = {name: torch.zeros(stored.shape) for name, stored in hf_layout(arch, "float32").items()}
    write_folder(arch, tmp_path, tensors)  # logits of 0: every token is as likely as any other
    LETTERS.save(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(0)
    answers = model.generate(torch.zeros(4, 1, dtype=torch.long), do_sample=True, max_new_tokens=ROOM)[:, 1:]
    for answer in answers:
        ends = (answer == LETTERS.eos_ids[0]).nonzero().flatten().tolist()
        assert ends and ends == list(range(ends[0], answer.numel())), "it ends at the first end token, then is filled"


@pytest.mark.parametrize("written", [None, 7, [5, 7]])
def test_every_end_token_of_the_model_is_in_the_export(written, tmp_path):
    model = byte_bpe_folder(tmp_path / "in")
    if written is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": written, "top_k": 3}))
    tokenizer = HFTokenizer(model)
    (tmp_path / "out").mkdir()
    write_folder(arch_from_preset("llama_tiny", {}, 320), tmp_path / "out")
    tokenizer.save(tmp_path / "out")
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    named = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    assert set(named) == set(tokenizer.eos_ids) == set(HFTokenizer(tmp_path / "out").eos_ids)
    assert settings.top_k == (transformers.GenerationConfig().top_k if written is None else 3)


def test_tokenizer_and_further_settings_come_along(tmp_path):
    arch = ARCHS["biases, tied"]
    save_model(arch, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text('{"kept": true}')
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    run_ranks(1, exports, tmp_path / "out", arch, ParallelLayout(1), tmp_path / "in")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"kept": true}'
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    arch = ARCHS["biases, tied"]
    save_model(arch, tmp_path / "in")
    (tmp_path / "like").touch()
    run_ranks(2, exports, tmp_path / "out", arch, ParallelLayout(2, 2), tmp_path / "in")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {(tmp_path / "like").stat().st_mode}


def test_a_folder_that_exists_is_left_alone_and_every_rank_hears_of_it(tmp_path):
    arch = ARCHS["biases, tied"]
    save_model(arch, tmp_path / "in")
    before = (tmp_path / "in" / "model.safetensors").read_bytes()
    messages = run_ranks(4, exports, tmp_path / "in", arch, ParallelLayout(4, 2, 2), tmp_path / "in")
    assert all("exists already. Choose a new folder" in message for message in messages)
    assert (tmp_path / "in" / "model.safetensors").read_bytes() == before


def test_a_place_that_cannot_be_written_leaves_nothing_that_looks_whole(tmp_path):
    arch = ARCHS["biases, tied"]
    save_model(arch, tmp_path / "in")
    (tmp_path / "file").write_text("in the way")
    messages = run_ranks(4, exports, tmp_path / "file" / "out", arch, ParallelLayout(4, 2, 2), tmp_path / "in")
    assert all("Cannot write the Hugging Face export" in message for message in messages)


def test_a_remnant_of_an_export_that_was_cut_off_is_replaced(tmp_path):
    arch = ARCHS["biases, tied"]
    save_model(arch, tmp_path / "in")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model-00001-of-00009.safetensors").write_bytes(b"half")
    run_ranks(1, exports, tmp_path / "out", arch, ParallelLayout(1), tmp_path / "in")
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors") == [
        "model.safetensors"
    ]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("most", [1, 10_000, 40_000, 1 << 30])
def test_files_stay_within_the_limit_unless_one_tensor_is_larger(most):
    arch = ARCHS["biases, tied"]
    layout = hf_layout(arch, "float32")
    files = assign_files(layout, most)
    assert {name: stored for content in files.values() for name, stored in content.items()} == layout
    hf = counted(arch)
    for content in files.values():
        assert len(content) == 1 or sum(hf[name].nbytes for name in content) <= most
