"""A round's answers as they are drawn: all ranks pull prompts, and a thread of each judges what its rank has drawn.

What comes of it are the journals of samples.jsonl and scores.jsonl, and no rank waits here for what another draws or
judges. lib/rollouts/collect.py makes the files of them, whatever is missing then. So a rank may draw the next round's
answers, and learn while a judge in another process, or on another machine, scores them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from lib.distributed.work_queue import Lines, WorkQueue

Judge = Callable[[], Lines]  # scores a chunk's answers

ASK_SECONDS = 0.25  # between two questions whether a chunk is still wanted: a message to rank 0 each


class JudgingThread:
    """Judges chunks in a thread, one after the other, and hands in their scores."""

    def __init__(self, scores: WorkQueue):
        self.seconds = 0.0
        self._scores = scores
        self._waiting: SimpleQueue[tuple[int, Judge] | None] = SimpleQueue()
        self._ends = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="judging", daemon=True)
        self._thread.start()

    def add(self, chunk: int, judge: Judge) -> None:
        """Judges a chunk, when those before it are done.

        Raises:
            UserError: the judge failed on a chunk before it.
        """
        if self._fault is not None:
            raise self._fault
        self._waiting.put((chunk, judge))

    def end(self) -> None:
        """Judges nothing after the chunk in hand."""
        self._ends = True
        self._waiting.put(None)

    def join(self) -> None:
        """Returns when the chunk in hand is judged, after `end`.

        Raises:
            UserError: the judge failed on a chunk.
        """
        self._thread.join()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            while (item := self._waiting.get()) is not None and not self._ends:
                (chunk, judge), began = item, time.perf_counter()
                lines = judge()
                self.seconds += time.perf_counter() - began
                self._scores.finish(chunk, lines)
        except BaseException as fault:  # raised where somebody sees it
            self._fault = fault


@dataclass
class Drawing:
    """The drawing of a round, which this rank takes part in; its judging goes on behind it.

    Args:
        samples, scores: the queues of what the two journals lack.
        thread: None where the judge computes on the device of the model.
        sampling_seconds: of this rank; waiting_seconds: in which others still drew, and it had nothing to do.
    """

    samples: WorkQueue
    scores: WorkQueue
    thread: JudgingThread | None
    sampling_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def judging_seconds(self) -> float:
        """Of this rank, so far."""
        return self.thread.seconds if self.thread else 0.0

    def is_wanted(self, chunk: int) -> Callable[[], bool]:
        """Says, asked as often as one likes, whether a chunk in hand is still to be drawn."""
        asked, wanted = time.monotonic(), True

        def is_wanted() -> bool:
            nonlocal asked, wanted
            if wanted and time.monotonic() - asked > ASK_SECONDS:
                wanted, asked = self.samples.is_wanted(chunk), time.monotonic()
            return wanted

        return is_wanted

    def end(self) -> None:
        """Judges nothing after the chunk in hand, and does not wait for that."""
        if self.thread is not None:
            self.thread.end()

    def close(self, timeout_seconds: float) -> None:
        """Ends, with what is finished in the journals. timeout_seconds: the longest wait for the other ranks.

        Raises:
            UserError: the judge failed on a chunk.
        """
        self.end()
        with contextlib.ExitStack() as stack:
            stack.callback(self.scores.close, timeout_seconds)
            stack.callback(self.samples.close, timeout_seconds)
            if self.thread is not None:
                self.thread.join()
