"""What is found out about the installed vLLM without importing it."""

import os

import pytest

from mrl.engines.vllm.package_signature import OPTIONAL_REQUIREMENTS, broken_requirements
from tests.commands.doctor.test_versions import distribution

BUILT_FOR_ANOTHER_TORCH = "raise RuntimeError('operator torchvision::nms does not exist')"
ENDS_THE_PROCESS = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize("code", [BUILT_FOR_ANOTHER_TORCH, ENDS_THE_PROCESS, "import no_such_module"])
@pytest.mark.parametrize("name", OPTIONAL_REQUIREMENTS)
def test_a_package_that_ends_the_import_of_vllm_is_named_with_what_removes_it(name, code, tmp_path, monkeypatch):
    distribution(tmp_path, name, "9.9.9")
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert f"{name} 9.9.9" in broken_requirements()
    assert f"pip uninstall -y {name}`" in broken_requirements()
    (tmp_path / f"{name}.py").write_text("")
    assert broken_requirements() == ""


def test_packages_that_are_not_installed_break_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert broken_requirements() == ""
