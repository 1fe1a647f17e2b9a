"""The Slurm script that `./launch --emit slurm` prints, run by a real Slurm on two hosts made of namespaces."""

import os
import shutil
import signal
import sys
import time

import pytest

from lib.launch import command
from tests import rounding, tiny
from tests.cluster import PATH, Host

CONFIGURATION = """
ClusterName=tandem
SlurmctldHost=host-a
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/linear
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile=DISK/slurmctld.pid
SlurmdPidFile=DISK/slurmd.pid
SlurmdSpoolDir=DISK/spool
StateSaveLocation=DISK/state
NodeName=host-a,host-b CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.mark.long
def test_slurm_trains_what_one_machine_trains(three_hosts: list[Host], tmp_path, capsys) -> None:
    if missing := [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"no Slurm: {', '.join(missing)} missing (apt-get install slurmctld slurmd slurm-client)")
    hosts = three_hosts[:2]
    settings = [*tiny.settings(tmp_path, train__steps=4), "--config", str(tiny.config_file(tmp_path))]
    tiny.train(tmp_path, [*settings, "run.name=alone"])
    capsys.readouterr()
    words = ["--hosts", "a:1,b:1", "--python", sys.executable, "--emit", "slurm", "--", "train.py", *settings]
    assert command.main([*words, "run.name=slurm", "plan.shares=[5,3]"]) == 0
    (tmp_path / "job.sh").write_text(capsys.readouterr().out)
    (tmp_path / "slurm.conf").write_text(CONFIGURATION.replace("DISK", str(hosts[0].disk)))
    for host in hosts:
        for folder in ("spool", "state"):
            (host.outside / folder).mkdir(exist_ok=True)
    under = ["env", f"PATH={PATH}", f"SLURM_CONF={tmp_path}/slurm.conf"]
    quiet = {"stdout": -3, "stderr": -3}
    daemons = [hosts[0].start([*under, "slurmctld", "-D"], **quiet)]
    daemons += [host.start([*under, "slurmd", "-D", "-N", host.name], **quiet) for host in hosts]
    try:
        deadline = time.monotonic() + 120
        while "idle" not in hosts[0].run([*under, "sinfo", "--noheader"]).stdout and time.monotonic() < deadline:
            time.sleep(0.2)
        done = hosts[0].run([*under, "sbatch", "--wait", f"--output={tmp_path}/log", tmp_path / "job.sh"], timeout=120)
        assert done.returncode == 0, (done.stderr, (tmp_path / "log").read_text())
    finally:
        for daemon in daemons:
            os.killpg(daemon.pid, signal.SIGTERM)
        for host in hosts:
            for pid in host.processes():
                host.signal(pid, signal.SIGKILL)
        for daemon in daemons:
            daemon.wait(10)
    run = tmp_path / "runs/slurm"
    assert [tiny.steps_of(run, rank)[-1]["host"] for rank in (0, 1)] == ["host-a", "host-b"]
    assert tiny.difference(tmp_path / "runs/alone", run) <= rounding.limit_of(tmp_path / "runs/alone")
