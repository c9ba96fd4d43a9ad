"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd of our own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "sinfo")

CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=500
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=500
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; '' when there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if absent:
        return f"Debian's slurm-wlm and munge are not installed: no {', '.join(absent)}"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return ""


@dataclass(frozen=True)
class Cluster:
    """The running cluster; ``env`` points Slurm's commands at it."""

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(
        self, script: Path, *arguments: str, options: tuple[str, ...] = (), **variables: str
    ) -> tuple[str, Path]:
        """(job id, log file). ``options`` are sbatch's, ``variables`` the submitting shell's."""
        log = self.folder / f"job-{time.monotonic_ns()}.log"
        child = subprocess.run(
            ["sbatch", "--parsable", f"--output={log}", *options, str(script), *arguments],
            env={**self.env, **variables},
            cwd=script.parent.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        return child.stdout.strip(), log

    def wait(self, job: str, seconds: float) -> str:
        """The job's final state; fails the test when it has none in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            shown = self.run("scontrol", "show", "job", job).stdout
            state = shown.split("JobState=")[1].split()[0]
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state
            time.sleep(0.2)
        raise AssertionError(f"job {job} has not ended in {seconds:g} s")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons in the foreground, as children; end them afterwards."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, ports=_free_ports(3)))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    env = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
    # This process may itself be inside a launch; the jobs are not.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        env.pop(name, None)
    munge = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    with ExitStack() as stack:
        _start(stack, munge, env, folder)
        _until(lambda: (folder / "munge.sock").exists(), "munged")
        _start(stack, ["slurmctld", "-D", "-f", str(conf)], env, folder)
        for node in ("n1", "n2"):
            _start(stack, ["slurmd", "-D", "-f", str(conf), "-N", node], env, folder)
        ready = Cluster(folder, env)
        idle = ["sinfo", "--noheader", "--format=%T %D"]
        _until(lambda: ready.run(*idle).stdout.split() == ["idle", "2"], "slurmctld and slurmd")
        yield ready
        # slurmd does not end its steps when it ends.
        ready.run("scancel", "--user=root")
        _until(lambda: not ready.run("squeue", "--noheader").stdout, "the end of all jobs")


def _start(stack: ExitStack, command: list[str], env: dict[str, str], folder: Path) -> None:
    path = folder / f"{command[0]}.{Path(command[-1]).name}.log"
    log = stack.enter_context(path.open("w"))
    child = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def stop() -> None:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    stack.callback(stop)


def _until(done: object, what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not start in {seconds:g} s")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
