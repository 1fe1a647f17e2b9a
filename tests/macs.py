"""A Mac that is imitated on Linux: what its kernel calls itself, and a PATH of its tools, which record how they were called.

Nothing here was recorded on a Mac of ours: the forms are those that other people published (system_profiler's keys in
timmo001/system-bridge#3408 and exelban/stats#394, `spdisplays_asleep` as many tools read it).
"""

import json
import os
import platform
from pathlib import Path

import pytest

from tests.tiny import script


def profile(*displays: tuple[str, bool]) -> str:
    """What `system_profiler SPDisplaysDataType -json` prints of displays, each with whether it is awake."""
    screens = [
        {
            "_name": name,
            "_spdisplays_displayID": str(number),
            "spdisplays_main": "spdisplays_yes" if number == 1 else "spdisplays_no",
            "spdisplays_online": "spdisplays_yes",
            **({} if awake else {"spdisplays_asleep": "spdisplays_yes"}),
        }
        for number, (name, awake) in enumerate(displays, 1)
    ]
    gpu = {"_name": "Apple M4 Max", "spdisplays_mtlgpufamilysupport": "spdisplays_metal3", "sppci_cores": "40"}
    return json.dumps({"SPDisplaysDataType": [gpu | ({"spdisplays_ndrvs": screens} if screens else {})]})


def tool(folder: Path, name: str, prints: str = "", status: int = 0, does: str = "") -> Path:
    """A program of that name in a folder, of which `does` is a line; returns the file that gets a line for each call."""
    folder.mkdir(parents=True, exist_ok=True)
    calls, output = folder / f"{name}.calls", folder / f"{name}.output"
    output.write_text(prints)
    script(folder / name, f'echo "$*" >> "{calls}"\n{does}\ncat "{output}"\nexit {status}')
    return calls


def is_mac(monkeypatch: pytest.MonkeyPatch, folder: Path, displays: str) -> Path:
    """Makes this process believe that it is on a Mac with a GPU, whose displays sleep when pmset says so.

    Returns:
        The file of pmset's calls.
    """
    tool(folder, "system_profiler", displays)
    (folder / "dark").write_text(displays.replace("spdisplays_main", "spdisplays_asleep").replace("_no", "_yes"))
    calls = tool(folder, "pmset", does=f'cp "{folder}/dark" "{folder}/system_profiler.output"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr("lib.system.metal.SLEEP_SECONDS", 0.0)
    monkeypatch.setattr("lib.system.metal.uses_metal", lambda: True)
    return calls
