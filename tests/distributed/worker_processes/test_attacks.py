"""No attack of the table has an effect outside the sandbox, and programs that mean no harm work in it."""

import json
import os
import subprocess
import sys

import pytest

from mrl.distributed.worker_processes.sandbox import SandboxLimits, run_python
from tests.distributed.worker_processes.attacks import CALM
from tests.distributed.worker_processes.attacks_alone import ALONE
from tests.distributed.worker_processes.benign import BENIGN
from tests.source import ROOT

NOBODY = 65534
LIMIT_S = 300.0
WAYS = ["alone", pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("user", ["own", "nobody"])
@pytest.mark.parametrize("way", WAYS)
def test_no_attack_has_an_effect(way, user):
    given = {}
    if user == "nobody":
        if os.geteuid() != 0:
            pytest.skip("only root may run programs as another user")
        given = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    elif os.geteuid() == NOBODY:
        pytest.skip("this user is nobody")
    command = [sys.executable, "-m", "tests.distributed.worker_processes.run_attacks", way]
    variables = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S, **given
        )
    except PermissionError as error:
        pytest.skip(f"{user} may not read the tests: {error}")
    if user == "nobody" and ("Permission" in done.stderr or "No module named" in done.stderr):
        pytest.skip(f"{user} may not read Python or the tests: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found["missing"]:
        pytest.skip(found["missing"])
    assert found["effects"] == {}
    assert found["num_run"] == len(CALM) + len(ALONE) >= 250


TOGETHER = """
import os, traceback
for place, (name, source) in enumerate({programs!r}):
    os.makedirs(f"{{os.environ['HOME']}}/{{place}}")
    os.chdir(f"{{os.environ['HOME']}}/{{place}}")
    try:
        exec(source, {{"__name__": "__main__"}})
    except BaseException as error:
        print("failed", name, traceback.format_exc())
print("end")
"""


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_programs_that_mean_no_harm_work(way, part, tmp_path):
    assert len(BENIGN) >= 50
    code = TOGETHER.format(programs=list(BENIGN.items())[part::4])
    ran = run_python(code, str(tmp_path), SandboxLimits(time_s=120.0, memory_mb=512), bubblewrap=way == "bubblewrap")
    if ran.missing:
        pytest.skip(f"this kernel has no such lock: {ran.missing}")
    assert (ran.output, ran.status, ran.problem) == ("end\n", 0, "")
