"""The conversions as a user runs them: round trips by flags, plans, examples, one line for a mistake."""

import json
import runpy
import shlex
import sys

import pytest
from safetensors.torch import load_file

from mrl.commands import cli
from mrl.commands.convert.converters import CONVERTERS
from tests.checkpoint.formats.test_hf import write_folder
from tests.resharding.archs import counted, small
from tests.source import ROOT

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("convert_*.py"))
ARCH = small("qwen3_moe_tiny", moe_intermediate_size=16)


@pytest.fixture
def tool(monkeypatch, capsys):
    """Runs a tool; returns its exit status, stdout and stderr."""

    def run(name, *arguments):
        path = ROOT / "tools" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return run


@pytest.fixture
def model(tmp_path):
    (tmp_path / "hf").mkdir()
    write_folder(ARCH, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"kept": true}')
    return tmp_path / "hf"


def folders(source, target):
    return "--model_dir", source, "--output_dir", target


@pytest.mark.slow
def test_all_five_directions_by_flags(tool, model, tmp_path):
    names = [tmp_path / name for name in ("megatron", "back", "trtllm", "direct", "again")]
    megatron, back, trtllm, direct, again = names
    layout = ("--tensor-model-parallel-size", 2, "--pipeline_model_parallel_size=2", "--expert-model-parallel-size", 4)
    assert tool("convert_hf_to_megatron", *folders(model, megatron), *layout)[0] == 0
    assert tool("convert_megatron_to_hf", *folders(megatron, back), "--like", model)[0] == 0
    spread = ("--tp_size", 4, "--moe-tp-size", 2, "--moe_ep_size", 2, "--use_parallel_embedding")
    assert tool("convert_megatron_to_trtllm", *folders(megatron, trtllm), *spread)[0] == 0
    assert tool("convert_hf_to_trtllm", *folders(model, direct), *spread)[0] == 0
    assert tool("convert_trtllm_to_hf", *folders(trtllm, again), "--max_file_bytes", 50_000)[0] == 0
    for rank in range(4):
        name = f"rank{rank}.safetensors"
        assert (trtllm / name).read_bytes() == (direct / name).read_bytes()
    assert (back / "tokenizer.json").read_text() == '{"kept": true}'
    assert load_file(back / "model.safetensors").keys() == counted(ARCH).keys()
    assert (again / "model.safetensors.index.json").exists()
    for folder in names:
        status, out, _ = tool("verify_checkpoint", model, folder)
        assert (status, out.splitlines()[-1]) == (0, "same weights")


def test_verify_names_the_difference_and_says_no(tool, model, tmp_path):
    hf = counted(ARCH)
    hf["model.norm.weight"][2] = 0.5
    (tmp_path / "other").mkdir()
    write_folder(ARCH, tmp_path / "other", hf)
    status, out, _ = tool("verify_checkpoint", model, tmp_path / "other")
    assert status == 1
    assert "different    1 elements of 1 tensors" in out
    assert "first        model.norm.weight[2]" in out
    assert "  B          0.5 (float32, bits 0x3f000000)" in out
    assert tool("verify_checkpoint", model, tmp_path / "other", "--atol", "1e9")[0] == 0


def test_a_dry_run_prints_the_plan_and_writes_nothing(tool, model, tmp_path):
    arguments = (*folders(model, tmp_path / "out"), "--tp_size", 8, "--dtype", "float16", "--dry-run")
    status, out, _ = tool("convert_hf_to_trtllm", *arguments)
    assert status == 0
    for word in ("tensors ", "bytes ", "files          8,", "peak memory", "padding", "float32 -> float16:"):
        assert word in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_inspect_prints_the_same_as_json_and_as_text(tool, model):
    status, out, _ = tool("inspect_checkpoint", model, "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["format"], found["family"]) == ("huggingface", "qwen3_moe")
    assert found["tensors"]["model.norm.weight"] == {"shape": [32], "dtype": "float32", "file": "model.safetensors"}
    assert len(found["files"]["model.safetensors"]["xxh3"]) == 16
    _, text, _ = tool("inspect_checkpoint", model)
    assert found["files"]["model.safetensors"]["xxh3"] in text
    assert "  model.norm.weight  [32] float32" in text
    assert "xxh3" not in tool("inspect_checkpoint", model, "--json", "--no-hash")[1]


MISTAKES = {
    "no folder": (("hf_to_megatron", "--model_dir", "nowhere", "--output_dir", "out"), "nowhere' does not exist"),
    "wrong format": (("megatron_to_hf", "--model_dir", "hf", "--output_dir", "out"), "is not a Megatron checkpoint"),
    "layout": (
        ("hf_to_megatron", "--model_dir", "hf", "--output_dir", "out", "--tensor-model-parallel-size", "3"),
        "does not divide",
    ),
    "experts": (("hf_to_trtllm", "--model_dir", "hf", "--output_dir", "out", "--moe_ep_size", "3"), "is not tp_size=1"),
    "scales": (
        ("hf_to_trtllm", "--model_dir", "hf", "--output_dir", "out", "--fp8_activation_scales", "none.json"),
        "is not a JSON object of numbers",
    ),
    "output exists": (("hf_to_megatron", "--model_dir", "hf", "--output_dir", "hf"), "exists and was not made by"),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(tool, model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, _, err = tool(f"convert_{arguments[0]}", *arguments[1:])
    assert status == 2
    assert message in err
    assert err.startswith("convert_") and err.count("\n") == 1


SCRIPTS = {f"convert_{name.replace('-', '_')}" if "-" in name else f"{name}_checkpoint": name for name in CONVERTERS}


def test_each_converter_has_a_word_of_the_command_line_and_a_script():
    assert tuple(CONVERTERS) == cli.CONVERTER_NAMES
    assert len(TOOLS) == 7
    assert {*TOOLS, "inspect_checkpoint", "verify_checkpoint"} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_and_the_command_have_the_same_help(tool, script, capsys):
    status, out, _ = tool(script, "--help")
    with pytest.raises(SystemExit) as end:
        cli.main(["convert", SCRIPTS[script], "--help"])
    assert (status, end.value.code) == (0, 0)
    assert out.split("options:")[1] == capsys.readouterr().out.split("options:")[1]


@pytest.mark.parametrize("name", CONVERTERS)
def test_help_has_an_example_whose_flags_exist(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(f"mrl convert {name} {CONVERTERS[name].example}".replace("\\\n", " "))
    assert cli.main(words[1:]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mrl: error: ") and err.count("\n") == 1
    assert "does not exist" in err or "has no config.json" in err


def test_the_command_converts_describes_and_compares(model, tmp_path, capsys):
    trtllm = tmp_path / "trtllm"
    assert cli.main(["convert", "hf-to-trtllm", *map(str, folders(model, trtllm)), "--tp-size", "2"]) == 0
    assert cli.main(["convert", "verify", str(model), str(trtllm)]) == 0
    assert cli.main(["convert", "inspect", str(trtllm), "--json", "--no-hash"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["format"] == "trtllm"
