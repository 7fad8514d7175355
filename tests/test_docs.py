"""README speaks of what exists: paths, commands, keys, extras; and .ci/run runs its test command."""

import re
import shlex
import subprocess

import pytest

from mrl import cli
from mrl.config import Config, load
from mrl.keys import dotted_keys
from tests.source import ROOT
from tests.test_packaging import setup_keyword

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
TICKED = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
TOP = ("mrl/", "configs/", "launch/", "tools/", "tests/", ".ci/")


def first_command(marker: str) -> str:
    return README.split(f"<!-- {marker} -->\n```bash\n")[1].split("\n")[0]


def test_paths_exist():
    words = {word for text in (*TICKED, BLOCKS) for word in text.split()}
    paths = {word for word in words if word.startswith(TOP) and not re.search(r"[<>*]", word)}
    assert len(paths) > 10
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_files_that_a_table_asks_for_go_into_folders_that_exist():
    folders = {text.split("<")[0] for text in TICKED if text.startswith(TOP) and "<" in text}
    assert folders
    assert {folder for folder in folders if not (ROOT / folder).is_dir()} == set()


def commands() -> list[str]:
    found = []
    for line in BLOCKS.splitlines():
        for part in line.split("#")[0].split("&&"):
            words = part.split()
            if words[:1] == ["mrl"]:
                found.append(" ".join(words[1:]))
            elif "launch/torchrun.sh" in words:
                found.append(" ".join(words[words.index("launch/torchrun.sh") + 1 :]))
    return found


@pytest.mark.parametrize("command", commands())
def test_commands_are_accepted(command):
    words = shlex.split(command.replace("[key=value ...]", "train.num_steps=3").replace("[", "").replace("]", ""))
    arguments = cli._parse(["configs/quickstart.yaml" if word == "CONFIG" else word for word in words])
    if "overrides" in arguments:
        load(ROOT / arguments.config, arguments.overrides)


def test_every_command_of_the_command_line_is_told():
    told = {command.split()[0] for command in commands()}
    usage = cli._parser().format_help()
    listed = set(re.findall(r"^    (\w+) ", usage, re.MULTILINE))
    assert listed and listed == told


def test_config_keys_exist():
    sections = {key.split(".")[0] for key in dotted_keys(Config)}
    named = {text.split("=")[0] for text in TICKED if re.fullmatch(r"[a-z]+(\.\w+)+(=\w+)?", text)}
    keys = {
        key
        for key in named
        if key.split(".")[0] in sections and not key.endswith((".py", ".yaml", ".json", ".jsonl", ".html"))
    }
    assert len(keys) > 20
    known = dotted_keys(Config)
    assert keys - set(known) == set()


def test_every_section_is_in_the_table():
    sections = {key.split(".")[0] for key in dotted_keys(Config)}
    assert {section for section in sections if f"| `{section}` |" not in README} == set()


def test_extras_exist():
    named = {extra for text in re.findall(r"\.\[([\w,]+)\]", README) for extra in text.split(",")}
    assert named and named <= set(setup_keyword("extras_require"))


def test_the_two_commands_install_alike_and_ci_runs_the_second():
    assert first_command("quickstart").endswith("&& mrl train configs/quickstart.yaml")
    assert first_command("test").endswith("&& pytest")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extract,) = [line for line in script.splitlines() if line.startswith("test_command=")]
    shown = subprocess.run(
        ["bash", "-c", f'{extract}; printf %s "$test_command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout == first_command("test")


def test_plugins_that_readme_counts_are_there():
    from mrl.registry import names

    works = README.split("**Works**")[1].split("**Written")[0]
    for family in ("llama", "qwen2", "qwen3"):
        assert f"`{family}`" in works and family in names("models")
