"""A Mac, imitated: its commands answer with recorded outputs, and the one door to the system says Darwin.

    mac = darwin.Mac(tmp_path)                    # a MacBook Pro on its charger
    mac.says("pmset -g batt", darwin.ON_BATTERY)  # any answer can be another one
    mac.enter(monkeypatch)                        # this process
    subprocess.run(..., env=mac.environment())    # or another one

Where the answers come from: `vm_stat`, `pmset -g batt` and `pmset -g` are what Apple's sources print (system_cmds,
vm_stat.c, and PowerManagement, pmset.m), with figures of a MacBook; `scutil`, `sysctl` and `ioreg` have the forms of
their manual pages; system_profiler's JSON has the keys of reports that people published of Apple silicon. None was
recorded by us on a Mac. A command that is asked for something else fails, as one of BSD does at a GNU option.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import stat
from pathlib import Path

import pytest

from lib.system import network

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              123456.
Pages active:                            789012.
Pages inactive:                          345678.
Pages speculative:                        12345.
Pages throttled:                              0.
Pages wired down:                        234567.
Pages purgeable:                          56789.
"Translation faults":                  98765432.
Pages copy-on-write:                     345678.
Pages zero filled:                      8765432.
Pages reactivated:                       234567.
Pages purged:                             45678.
File-backed pages:                       456789.
Anonymous pages:                         678901.
Pages stored in compressor:              123456.
Pages occupied by compressor:             45678.
Decompressions:                            5678.
Compressions:                             12345.
Pageins:                                  56789.
Pageouts:                                  1234.
Swapins:                                    123.
Swapouts:                                    45.
"""
FREE_BYTES = (123456 + 345678 + 12345 + 56789) * 16384
ON_CHARGER = """\
Now drawing from 'AC Power'
 -InternalBattery-0 (id=5439587)\t100%; charged; 0:00 remaining present: true
"""
ON_BATTERY = """\
Now drawing from 'Battery Power'
 -InternalBattery-0 (id=5439587)\t82%; discharging; 5:12 remaining present: true
"""
NO_BATTERY = "Now drawing from 'AC Power'\n"  # a Mac Studio
SETTINGS = """\
System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                0 (sleep prevented by caffeinate)
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 {mode}
 womp                 1
"""
NORMAL, LOW, HIGH = " lowpowermode         0", " lowpowermode         1", " powermode            2"
DISPLAYS = """\
{"SPDisplaysDataType": [{"_name": "Apple M4 Max", "spdisplays_mtlgpufamilysupport": "spdisplays_metal4",
  "sppci_cores": "40", "sppci_model": "Apple M4 Max", "spdisplays_vendor": "sppci_vendor_Apple",
  "spdisplays_ndrvs": [
    {"_name": "Color LCD", "_spdisplays_resolution": "1728 x 1117 @ 120.00Hz", "spdisplays_online": "spdisplays_yes",
     "spdisplays_main": "spdisplays_yes", "spdisplays_connection_type": "spdisplays_internal"%s}]}]}
"""
LIT, ASLEEP = DISPLAYS % "", DISPLAYS % ', "spdisplays_asleep": "spdisplays_yes"'
REGISTRY = """\
+-o J616cAP  <class IOPlatformExpertDevice, id 0x100000228, registered, matched, active, busy 0 (0 ms), retain 40>
    {
      "manufacturer" = <"Apple Inc.">
      "IOPlatformSerialNumber" = "SERIALNUMB"
      "IOPlatformUUID" = "%s"
      "model" = <"Mac16,5">
    }
"""
UUID = "5B4A3C2D-1E0F-5A6B-8C7D-9E0F1A2B3C4D"
BOOT = "6C1FB2E0-54A7-4D0C-9E7B-2B7B7F2D7A10"  # of this start of the system


def forget_names() -> None:
    """What a process asks once, it asks anew: before it becomes a Mac, and after."""
    network.own_name.cache_clear()
    network.machine_id.cache_clear()


class Mac:
    """Commands in a folder of their own, which is the whole PATH of what runs here (besides what `keeping` names)."""

    def __init__(self, folder: Path, name: str = "Jans-MacBook-Pro"):
        self.folder = folder / "usr-bin"
        self.folder.mkdir()
        self.name = name
        self.answers: dict[str, str] = {}
        self.says("vm_stat", VM_STAT)
        self.says("pmset -g batt", ON_CHARGER)
        self.says("pmset -g", SETTINGS.format(mode=NORMAL.strip()))
        self.says("pmset -g therm", "Note: No thermal warning level has been recorded\n")
        self.says("scutil --get LocalHostName", f"{name}\n")
        self.says("scutil --get ComputerName", "Jan's MacBook Pro\n")
        self.says("sysctl -n hw.memsize", f"{128 * 2**30}\n")
        self.says("sysctl -n machdep.cpu.brand_string", "Apple M4 Max\n")
        self.says("sysctl -n iogpu.wired_limit_mb", "0\n")
        self.says("sysctl -n sysctl.proc_translated", "0\n")
        self.says("sysctl -n kern.bootsessionuuid", f"{BOOT}\n")
        self.says("ioreg -rd1 -c IOPlatformExpertDevice", REGISTRY % UUID)
        self.says("system_profiler SPDisplaysDataType -json", ASLEEP)

    def says(self, command: str, output: str | None) -> None:
        """What a command prints from now on; None: it fails."""
        self.answers[command] = output if output is not None else ""
        if output is None:
            del self.answers[command]
        program = command.split()[0]
        lines = ["#!/bin/sh", 'case "$*" in']
        for words, answer in self.answers.items():
            if words.split()[0] == program:
                rest = " ".join(words.split()[1:])
                lines.append(f"{shlex.quote(rest)}) printf %s {shlex.quote(answer)} ;;")
        lines += [f'*) echo "{program}: illegal option or no such value: $*" >&2; exit 1 ;;', "esac"]
        path = self.folder / program
        path.write_text("\n".join(lines) + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    def keeping(self, *programs: str) -> None:
        """Puts programs of this machine's beside the Mac's."""
        for program in programs:
            (self.folder / program).symlink_to(str(shutil.which(program)))

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes this process one of the Mac's."""
        monkeypatch.setenv("PATH", str(self.folder))
        monkeypatch.setattr(platform, "system", lambda: "Darwin")
        monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
        forget_names()

    def environment(self) -> dict[str, str]:
        """For a process that is to run on the Mac: Python reads what plays Darwin at its start."""
        hook = self.folder.parent / "hook"
        hook.mkdir(exist_ok=True)
        (hook / "sitecustomize.py").write_text(
            "import platform\nplatform.system = lambda: 'Darwin'\nplatform.mac_ver = lambda: ('26.1', ('', '', ''), 'arm64')\n"
        )
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMIX"))}
        return {**inherited, "PATH": str(self.folder), "PYTHONPATH": str(hook)}
