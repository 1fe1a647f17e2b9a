"""Whether a rank that ended had run out of memory: its host's agent watches it, for such a rank cannot report it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import deque
from pathlib import Path

from lib.launch.agent_messages import Beat
from lib.system import files, hardware, out_of_memory

LAST_LINES = 40  # of a rank's output, in which MLX may have reported why it ended


class MemoryWatch:
    """What an agent saw of one rank: its last lines, its last beat, the memory it held, and the kernel's kills."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.facts: Beat = {}  # the last beat
        self.groups = ""  # the control groups that it was in
        self.kills: dict[str, int] = {}  # by the kernel, before it began
        self.held_bytes = 0
        self.is_over = False

    def see_alive(self, pid: int) -> None:
        """Notes what a living rank holds, and what the kernel has killed so far."""
        groups = out_of_memory.control_groups(pid)
        self.kills = {**out_of_memory.kernel_kills(groups), **self.kills}  # who is counted first counts
        self.groups = groups
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
            self.held_bytes = pages * os.sysconf("SC_PAGE_SIZE") or self.held_bytes

    def ran_out(self, status: int | None) -> str | None:
        """The evidence that the rank ran out of memory, None if there is none. The run's folder keeps it for later.

        status: of its end; None where only its parent knows it.
        """
        if self.facts.get("ended"):
            return None
        killed = out_of_memory.has_killed(self.kills, out_of_memory.kernel_kills(self.groups))
        evidence = out_of_memory.evidence(-signal.SIGKILL if status is None else status, list(self.lines), killed)
        if evidence is None:
            return None
        if self.held_bytes:
            evidence += f"; it held {self.held_bytes / 1e9:.4g} GB when last seen"
        if self.facts.get("run") and self.facts.get("micro_batch_size"):
            note = {name: self.facts.get(name) for name in ("rank", *out_of_memory.NOTED)}
            note |= {"evidence": evidence, "boot": hardware.boot_id()}
            file = Path(self.facts["run"]) / out_of_memory.NOTE.format(host=self.facts["machine"])
            with contextlib.suppress(OSError):
                files.write_atomically(file, json.dumps(note) + "\n")
            evidence += f", with micro-batches of {self.facts['micro_batch_size']}; the next start takes half there"
        return evidence
