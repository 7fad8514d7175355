"""Scripts of ten kinds are translated to the values, losses and commands that their settings have."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from mrl.commands.cli import main
from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.translate import translate
from mrl.config.config import Config, load
from tests.commands.from_verl import script_kinds
from tests.commands.from_verl.script_kinds import COUNT, OWN, case


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    (tmp_path / "lib_of_test.sh").write_text(script_kinds.LIBRARY)
    for name in ("score.py", "s.py"):
        (tmp_path / name).write_text("def own(): ...\n\n\ndef compute_score(): ...\n")
    return tmp_path


def value_of(tree, key):
    """The value of a dotted key in a config as YAML; mrl's default where it is not there."""
    found, default = tree, Config()
    for part in key.split("."):
        found = found.get(part, {}) if isinstance(found, dict) else {}
        default = getattr(default, part)
    return default if found == {} else found


def wrong(kind, number, folder):
    """Returns the differences from the expected outcome of a script."""
    expected, file = case(kind, number), folder / f"{kind}_{number}.sh"
    file.write_text(expected.text)
    found = translate(read_settings([str(file)]))
    tree = yaml.safe_load(found.document("run.yaml"))
    load(tree)
    values = {
        key: value_of(tree, key)
        for key, value in expected.values.items()
        if value is not None and value_of(tree, key) != value
    }
    lost = {line.partition("=")[0].partition(":")[0] for line in found.lost}
    command = found.command("run.yaml")
    others = [] if command == f"{expected.command}run.yaml" else [command]
    comments = [line for line in found.document("x").splitlines() if line.startswith("# - ")]
    assert len(comments) == len(found.lost) and set(found.lost) <= set(found.missing)
    return [values, lost ^ expected.lost, others] if values or lost != expected.lost or others else []


@pytest.mark.parametrize("kind", OWN)
def test_a_script_of_each_kind_has_its_outcome(kind, folder):
    assert [wrong(kind, number, folder) for number in range(2)] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_twenty_scripts_of_each_kind_have_their_outcomes(kind, folder):
    with ThreadPoolExecutor(4) as pool:
        found = dict(enumerate(pool.map(lambda number: wrong(kind, number, folder), range(COUNT))))
    assert {number: one for number, one in found.items() if one} == {}
    assert any(case(kind, number).lost for number in range(COUNT))


RUN = ["algorithm.adv_estimator=grpo", "data.train_files=a.parquet", "actor_rollout_ref.model.path=tiny"]
LOST = {"actor_rollout_ref.model.mtp.enable_train": "True", "x.y": "a\nb"}


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize(("loses", "options", "status"), [
    (False, (), 0), (False, ("--lossy",), 0), (True, (), 2), (True, ("--lossy",), 0),
])  # fmt: skip
def test_the_status_and_the_config_say_what_is_lost(loses, options, status, place, folder, capsys):
    words = [*RUN, *(f"+{key}={value}" for key, value in LOST.items() if loses)]
    line = [*options, "-o", "run.yaml", *words] if place == "before" else [*words, "-o", "run.yaml", *options]
    assert main(["from-verl", *line]) == status
    said, text = capsys.readouterr().err, (folder / "run.yaml").read_text()
    assert load(folder / "run.yaml").algorithm.name == "grpo" and "# Translated" in text and "world size 8" in text
    assert [f"# - {key}=" in text for key in LOST] == [loses] * 2 == [f"mrl: LOST: {key}=" in said for key in LOST]
    assert said.splitlines()[-2].endswith("mrl train run.yaml --dry-run --world-size 8")
