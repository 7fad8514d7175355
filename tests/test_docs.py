"""README and mrl/docs speak of what exists: paths, commands, keys, extras; and .ci/run runs README's test command."""

import re
import shlex
import subprocess

import pytest

from mrl.commands import cli
from mrl.config.config import Config, load
from mrl.config.keys import dotted_keys
from mrl.trainer.validation import objectives
from mrl.trainer.validation.docs_reference import reference
from tests.source import ROOT
from tests.test_packaging import setup_keyword

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "mrl" / "docs").glob("*.md"))}
TEXT = "\n".join([README, *PAGES.values()])
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
VERL = PAGES["verl.md"]
"""Its first column holds keys of another project."""


def ticked(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


TICKED = ticked(TEXT.replace(VERL, ""))
TOP = ("mrl/", "configs/", "launch/", "tools/", "tests/", ".ci/", ".github/")


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
            part = re.sub(r"^\s*source <\((.*)\)\s*$", r"\1", part).partition(" >")[0]
            words = part.split()
            if words[:1] == ["mrl"]:
                found.append(" ".join(words[1:]))
            elif "launch/torchrun.sh" in words:
                found.append(" ".join(words[words.index("launch/torchrun.sh") + 1 :]))
    return found


@pytest.mark.parametrize("command", commands())
def test_commands_are_accepted(command):
    words = shlex.split(command.replace("[key=value ...]", "train.num_steps=3").replace("[", "").replace("]", ""))
    arguments = cli._parse(["configs/quickstart.yaml" if word in ("CONFIG", "my_run.yaml") else word for word in words])
    if "overrides" in arguments:
        given = getattr(arguments, "config", None) or "configs/quickstart.yaml"  # `serve` takes folders too
        load(ROOT / given, arguments.overrides)


def test_every_command_of_the_command_line_is_told():
    told = {command.split()[0] for command in commands()}
    usage = cli._parser().format_help()
    listed = set(re.findall(r"^    ([\w-]+)(?: |$)", usage, re.MULTILINE))
    assert listed and listed == told


def test_the_page_of_objectives_holds_the_tables():
    assert PAGES["objectives.md"].endswith(objectives.tables())


def test_config_keys_exist():
    sections = {key.split(".")[0] for key in dotted_keys(Config)}
    rows = [line.split("|")[2] for line in VERL.splitlines() if line.startswith("| `")]
    rest = "\n".join(line for line in VERL.splitlines() if not line.startswith("|"))
    words = [*TICKED, *ticked("\n".join([*rows, rest.replace("actor_rollout_ref.", "verl.")]))]
    named = {text.split("=")[0] for text in words if re.fullmatch(r"[a-z]+(\.\w+)+(=.+)?", text)}
    keys = {
        key
        for key in named
        if key.split(".")[0] in sections
        and not key.endswith((".py", ".yaml", ".json", ".jsonl", ".html", ".log", ".safetensors"))
    }
    assert len(keys) > 20
    known = dotted_keys(Config)
    known |= {key.rpartition(".")[0]: None for key in known if key.count(".") > 1}  # sections inside sections
    inside = {key for key in keys if key.startswith("rollout.engine_kwargs.")}  # a mapping's own keys
    assert keys - inside - set(known) == set()


def test_links_lead_to_pages_and_every_page_is_linked():
    links = set(re.findall(r"\]\(([^)#:]+)\)", README))
    assert {f"mrl/docs/{name}" for name in PAGES} <= links
    assert {link for link in links if not (ROOT / link).is_file()} == set()
    between = {link for page in PAGES.values() for link in re.findall(r"\]\(([^)#:]+)\)", page)}
    assert between and between <= set(PAGES)
    contents = (ROOT / "mrl" / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"\S+\.md", contents)) == set(PAGES)
    assert "docs_dir: docs\n" in contents, "mkdocs refuses the folder of its own file, if that is given as a whole path"


def test_the_reference_of_the_config_is_that_of_the_code():
    assert PAGES["config.md"] == reference()
    keys = re.findall(r"^\| `(\S+)` \|", PAGES["config.md"], re.MULTILINE)
    assert set(dotted_keys(Config)) == {key for key in keys if "[*]" not in key}
    assert [line for line in PAGES["config.md"].splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


def test_overrides_in_the_table_are_accepted():
    rows = [
        line.split("|")[1]
        for line in PAGES["configuring.md"].splitlines()
        if line.startswith("| `") and ("=" in line or "~" in line)
    ]
    overrides = [text.strip("'") for row in rows for text in ticked(row) if "=" in text or "~" in text]
    assert len(overrides) >= 7
    for override in overrides:
        load(ROOT / "configs" / "quickstart.yaml", [override])


def test_every_section_is_in_the_table():
    sections = {key.split(".")[0] for key in dotted_keys(Config)}
    assert {section for section in sections if f"| `{section}` |" not in PAGES["configuring.md"]} == set()


def test_extras_exist():
    named = {extra for text in re.findall(r"\.\[([\w,]+)\]", TEXT) for extra in text.split(",")}
    assert named and named <= set(setup_keyword("extras_require"))


def test_the_two_commands_install_alike_and_ci_runs_the_second():
    assert first_command("quickstart").endswith("&& mrl train configs/quickstart.yaml")
    assert first_command("test").endswith("&& pytest -n 3 --dist loadfile")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extract = "\n".join(re.findall(r"^(?:test_command|install|tests)=.*", script, re.MULTILINE))
    first = script.index('run_tests bare "$tests"')
    assert script.index('-c "$install"') < first < script.index('run_tests more "$tests -m slow"')
    for word in ("apt-get install -y", "mpi4py", "tests/engines/vllm/requirements.txt"):
        assert script.rindex(word) > first, "nothing but README's command is installed before its tests run"
    shown = subprocess.run(
        ["bash", "-c", f'{extract}; printf %s "$install && $tests"'], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert shown.stdout == first_command("test")


def test_plugins_that_readme_counts_are_there():
    from mrl.config.registry import names

    works = README.split("\n| Models |")[1].split("\n")[0]
    for family in ("llama", "qwen2", "qwen3"):
        assert f"`{family}`" in works and family in names("models")
