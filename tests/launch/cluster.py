"""A private SLURM of two nodes on this machine: real daemons, no rights and no names needed.

Owns a folder with the configuration, the key, the daemons and their logs. The nodes are called 127.0.0.1 and 127.0.0.2,
so that their names resolve everywhere. Debian's build runs several slurmd on one host.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 20
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
NODES = ("127.0.0.1", "127.0.0.2")

CONF = """
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
MinJobAge=86400
FirstJobId={first_job}
KillWait=5
JobRequeue=1
SlurmdParameters=config_overrides
PropagateResourceLimitsExcept=ALL
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if _path(name) is None]


def _path(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


class Cluster:
    """A running SLURM; `stop` ends every job and daemon."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environment |= {"SLURM_CONF": str(root / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.daemons: list[subprocess.Popen[bytes]] = []
        (root / "munge").mkdir(mode=0o711)
        (root / "state").mkdir()
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(1 + len(NODES))
        nodes = [NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports[1:], strict=True)]
        first_job = 1 + secrets.randbelow(10_000)  # a job's port follows from its number: two clusters here must differ
        conf = CONF.format(
            host=host, user=getpass.getuser(), port=ports[0], root=root, nodes="\n".join(nodes), first_job=first_job
        )
        (root / "slurm.conf").write_text(conf)
        (root / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        key = self.root / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        self._daemon("munged", "--foreground", "--force", *(f"--{k}={self.root}/munge/{v}" for k, v in files.items()))
        deadline = time.monotonic() + START_TIMEOUT_S
        self._daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        while self.output("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() != list(NODES):
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.daemons):
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.root.glob("*.log")))
                raise RuntimeError(f"SLURM's nodes are not idle after {START_TIMEOUT_S} s:\n{logs}")
            time.sleep(0.1)

    def _daemon(self, name: str, *arguments: str) -> None:
        with open(self.root / f"{name}.{len(self.daemons)}.log", "ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [str(_path(name)), *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True, preexec_fn=_end_with_parent,
                )
            )  # fmt: skip

    def output(self, *command: str) -> str:
        """What one of SLURM's programs prints; "" where it fails."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    def submit(self, folder: Path, *command: str, **variables: str) -> str:
        """The id of a new job, run in `folder`."""
        done = subprocess.run(
            ["sbatch", "--parsable", *command], cwd=folder, env=self.environment | variables, capture_output=True,
            text=True, timeout=START_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """SLURM's fields of a job: JobState, ExitCode, Restarts ..."""
        return dict(re.findall(r"(\w+)=(\S+)", self.output("scontrol", "show", "job", job, "-o")))

    def wait(self, job: str, timeout_s: float) -> dict[str, str]:
        """Its fields when it has ended (`sbatch --wait` looks every 32 s only)."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)).get("JobState") not in ENDED:
            assert time.monotonic() < deadline, state
            time.sleep(0.2)
        return state

    def stop(self) -> None:
        self.output("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.output("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _end_with_parent() -> None:
    """Has the kernel end this process when the one that started it ends, by kill -9 too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
