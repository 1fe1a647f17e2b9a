"""A host's standby as its agent has it: started, getting ready, and taken for a rank, ready or not."""

from __future__ import annotations

import asyncio
import json
import signal

from lib.launch.host_ranks import signal_group

READY = b"ready"  # the first line of a standby's output (lib/launch/standby.py)


class Standby:
    """A process of lib/launch/standby.py. Its agent may take it at any time: it then goes on from where it is."""

    def __init__(self, process: asyncio.subprocess.Process, expected: list[str], local_ranks: int):
        """Says what it may become.

        Args:
            expected: the command's words, for what is to be read.
            local_ranks: of this host, which share its cores.
        """
        self.process, self.is_ready, self.is_over = process, False, False
        assert process.stdin is not None
        process.stdin.write(json.dumps({"command": expected, "local_ranks": local_ranks}).encode() + b"\n")
        self.getting_ready = asyncio.ensure_future(self._get_ready())

    @property
    def lives(self) -> bool:
        return not self.is_over and self.process.returncode is None

    async def _get_ready(self) -> None:
        assert self.process.stdout is not None
        self.is_ready = await self.process.stdout.readline() == READY + b"\n"
        if not self.is_ready:
            self.end()

    async def taken(self) -> asyncio.subprocess.Process | None:
        """The process, whose output is the taker's from now on; None where it is gone.

        Where it is not ready yet, it still says READY in a line of its own before anything else.
        """
        self.getting_ready.cancel()
        await asyncio.wait([self.getting_ready])
        return self.process if self.lives else None

    def end(self) -> None:
        """Ends the process, if it is there."""
        self.is_over = True
        if self.process.returncode is None:
            signal_group(self.process.pid, signal.SIGKILL)
