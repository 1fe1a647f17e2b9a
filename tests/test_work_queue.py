"""The work queue: each item is in the output once, whatever ranks are killed, stopped or slow."""

import json
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from lib.distributed.connection import new_key
from lib.distributed.work_queue import Journal, RemoteQueue, ServedQueue, work
from lib.errors import UserError

KEY = new_key()


def remote(queue: ServedQueue, rank: int) -> RemoteQueue:
    port = queue.listener.address[1] if queue.listener else queue.listen("127.0.0.1", KEY)
    return RemoteQueue(["127.0.0.1"], port, KEY, rank, 10)


def test_all_ranks_together_do_each_item_once(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    queue = ServedQueue(Journal(out, "a", 40))
    remotes = [remote(queue, rank) for rank in (1, 2)]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(work, one, lambda item: [f"row {item}"]) for one in (queue, *remotes)]:
            done.result(30)
    for one in remotes:
        one.close(1)
    assert sum(queue.finished_by.values()) == 40
    queue.journal.finish(out)
    queue.close(10)
    assert out.read_text() == "".join(f"row {item}\n" for item in range(40))
    assert not queue.journal.path.exists()


def test_a_lost_rank_gives_its_item_back_and_a_slow_one_is_overtaken(tmp_path) -> None:
    queue = ServedQueue(Journal(tmp_path / "out", "a", 2))
    lost, slow = remote(queue, 1), remote(queue, 2)
    assert (lost.take(), slow.take()) == (0, 1)
    lost.close(1)
    assert [queue.take(), queue.take()] == [0, 1]  # the lost one's, then a repetition of the slow one's
    queue.finish(1, ["fast"])
    assert not slow.is_wanted(1)
    slow.finish(1, ["slow"])
    queue.finish(0, ["again"])
    assert slow.take() is None and queue.take() is None
    assert list(queue.journal.lines()) == ["again", "fast"]
    slow.close(1)
    queue.close(5)


def test_a_failure_ends_the_work_of_all(tmp_path) -> None:
    queue = ServedQueue(Journal(tmp_path / "out", "a", 2))
    other = remote(queue, 1)

    def fail(item: int) -> None:
        raise UserError(f"row {item} is empty")

    with pytest.raises(UserError, match="row 0 is empty"):
        work(other, fail)
    with pytest.raises(UserError, match="row 0 is empty"):
        queue.take()
    queue.close(0.1)
    with pytest.raises(UserError, match="rank 0, which has the work queue, left"):
        other.finish(0, [])


def test_the_journal_goes_on_after_a_kill_and_refuses_what_is_not_its(tmp_path) -> None:
    out = tmp_path / "out"
    journal = Journal(out, "a", 3)
    journal.add(2, ["two", "ä"])
    journal.add(0, ["zero"])
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"item": 1, "lin')  # the kill
    journal = Journal(out, "a", 3)
    assert journal.missing == [1]
    journal.add(1, [])
    journal.finish(out)
    assert out.read_text() == "zero\ntwo\nä\n"
    with pytest.raises(UserError, match="is there already"):
        Journal(out, "a", 3)
    out.unlink()
    Journal(out, "a", 3).close()
    with pytest.raises(UserError, match="another model, data or settings"):
        Journal(out, "b", 3)
    with journal.path.open("ab") as file:
        file.write(json.dumps({"item": 7, "lines": []}).encode() + b"\n")
    with pytest.raises(UserError, match="broken at byte"):
        Journal(out, "a", 3)


def test_a_full_disk_leaves_whole_lines_and_a_cut_header_begins_again(tmp_path) -> None:
    journal = Journal(tmp_path / "out", "a", 3)
    header = journal.path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(header) + 5, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.add(1, ["one"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.add(2, ["two"])
    assert journal.missing == Journal(tmp_path / "out", "a", 3).missing == [0, 1]
    for size in range(len(header)):
        journal.path.write_bytes(header[:size])
        assert Journal(tmp_path / "out", "a", 3).missing == [0, 1, 2]
        assert journal.path.read_bytes() == header


def test_an_output_that_is_whole_is_done_though_its_journal_is_there(tmp_path) -> None:
    out = tmp_path / "out"
    journal = Journal(out, "a", 2)
    journal.add(0, ["zero"])
    half = journal.path.read_bytes()
    journal.add(1, ["one"])
    whole = journal.path.read_bytes()
    journal.finish(out)
    journal.path.write_bytes(whole)  # the process was killed between the two
    Journal(out, "a", 2).finish(out)
    assert list(tmp_path.iterdir()) == [out] and out.read_text() == "zero\none\n"
    journal.path.write_bytes(half)
    with pytest.raises(UserError, match="is there already"):
        Journal(out, "a", 2)
