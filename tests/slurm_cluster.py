"""A real two-node SLURM cluster on this machine, for tests: `with SlurmCluster(directory) as cluster: ...`.

One munged, one slurmctld and two slurmd (`-N n1`, `-N n2`), all in the foreground as children of this process, with
configuration, keys, sockets and spools under `directory`: nothing in /etc or /run is read or written, and two clusters
may live side by side.
Commands find it through the environment variable SLURM_CONF (`cluster.environment`).

    python tests/slurm_cluster.py COMMAND ...     runs COMMAND inside a fresh cluster, e.g. `bash` to look around
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
# Debian keeps daemons in sbin, which an ordinary PATH may lack.
SEARCH_PATH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"

# cred_expire is what a requeued job waits before it may start again (120 s by default); sched_interval and bf_interval
# are how often the scheduler looks for jobs that may start. config_overrides lets the nodes claim more than there is.
CONFIG = """\
ClusterName=fulgurite
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
JobRequeue=1
EnforcePartLimits=ALL
KillWait=20
MinJobAge=3600
MessageTimeout=60
ReturnToService=2
SlurmctldTimeout=300
SlurmdTimeout=300
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs=2 RealMemory=4000
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=short Nodes=n1 MaxTime=2 State=UP
"""


def missing_programs() -> list[str]:
    """SLURM's programs that this machine lacks: empty when a cluster can be started."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]


def _free_ports(count: int) -> list[int]:
    """Ports below the ephemeral range, so that no outgoing connection takes one before its daemon listens."""
    found: list[int] = []
    while len(found) < count:
        port = 6000 + secrets.randbelow(5000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def _die_with_parent() -> None:
    """A daemon must not outlive a test run that was killed (PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class SlurmCluster:
    """Two nodes, `n1` and `n2`, of two CPUs each; partitions `test` (default) and `short` (n1 only, 2 minutes)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
            "PATH": SEARCH_PATH,
            "SLURM_CONF": str(directory / "slurm.conf"),
        }
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> str:
        """Standard output of a command run inside the cluster's environment."""
        done = subprocess.run(
            command, env=self.environment, text=True, capture_output=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`, e.g. JobState, Restarts, ExitCode."""
        text = self.run("scontrol", "--oneliner", "show", "job", job_id)
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def wait(self, job_id: str, state: str = "COMPLETED", timeout: float = 120) -> dict[str, str]:
        """Wait until the job is in `state`.

        Raises:
            RuntimeError: the job ended in another state or `timeout` seconds have passed; shows the daemons' logs.
        """
        ended = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
        fields: dict[str, str] = {}
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            fields = self.job(job_id)
            if fields["JobState"] == state:
                return fields
            if fields["JobState"] in ended:
                break
            time.sleep(0.3)
        output = Path(fields.get("StdOut", ""))
        said = output.read_text(errors="replace")[-8000:] if output.is_file() else ""
        raise RuntimeError(f"job {job_id} is {fields.get('JobState')}, not {state}:\n{said}\n{fields}\n{self.logs()}")

    def logs(self, lines: int = 15) -> str:
        """The last lines that every daemon wrote."""
        parts = []
        for path in sorted(self.directory.glob("*.output")):
            parts.append(f"--- {path.name}")
            parts += path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(parts)

    def stop(self) -> None:
        """End every job, then the daemons, then whatever still runs with this cluster's configuration."""
        if any(name == "slurmctld" and process.poll() is None for name, process in self._daemons):
            subprocess.run(
                ["scancel", "--user=root"], env=self.environment, capture_output=True, timeout=60, check=False
            )
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and self.run("squeue", "--noheader", check=False).strip():
                time.sleep(0.2)
        for _, process in reversed(self._daemons):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._daemons.clear()
        for process in self._strays():
            process.kill()

    def _strays(self) -> list[psutil.Process]:
        """Step daemons and tasks: they carry this cluster's SLURM_CONF in their environment."""
        strays = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    strays.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return strays

    def _start(self) -> None:
        directory = self.directory
        for folder in (directory, directory / "state", *(directory / f"spool-{node}" for node in NODES)):
            folder.mkdir(parents=True, exist_ok=True)
        key = directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ctld_port, n1_port, n2_port = _free_ports(3)
        host = socket.gethostname().split(".")[0]
        (directory / "slurm.conf").write_text(
            CONFIG.format(host=host, directory=directory, ctld_port=ctld_port, n1_port=n1_port, n2_port=n2_port)
        )
        munge_files = [
            f"--{option}={directory / name}"
            for option, name in (
                ("key-file", "munge.key"),
                ("socket", "munge.socket"),
                ("pid-file", "munged.pid"),
                ("log-file", "munged.log"),
                ("seed-file", "munged.seed"),
            )
        ]
        # --force: a test's folder need not have the owners and modes that munged asks of /etc/munge.
        self._spawn("munged", "--foreground", "--force", *munge_files)
        self._until(lambda: (directory / "munge.socket").exists(), "munged")
        self._spawn("slurmctld", "-D", "-c", "-f", str(directory / "slurm.conf"))
        self._until(lambda: "UP" in self.run("scontrol", "ping", check=False), "slurmctld")
        for node in NODES:
            self._spawn("slurmd", "-D", "-N", node, "-f", str(directory / "slurm.conf"))
        self._until(lambda: self.run("sinfo", "-h", "-N", "-p", "test", "-o", "%T").split() == ["idle"] * 2, "slurmd")

    def _spawn(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=SEARCH_PATH)
        if program is None:
            raise FileNotFoundError(f"{name} is not installed: apt-get install slurm-wlm munge")
        with (self.directory / f"{name}.output").open("ab") as output:
            process = subprocess.Popen(
                [program, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
            )
        self._daemons.append((name, process))

    def _until(self, ready: Callable[[], bool], what: str, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            dead = [name for name, process in self._daemons if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what} did not come up ({f'{dead[0]} ended' if dead else 'time out'}):\n{self.logs()}"
                )
            time.sleep(0.2)


def main(command: Sequence[str]) -> int:
    """Run `command` inside a fresh cluster; its exit code."""
    if not command:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as directory, SlurmCluster(Path(directory)) as cluster:
        return subprocess.run(list(command), env=cluster.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
