"""Whatever is killed, the same command goes on to the same bits: a few kills; benchmarks/kill_resume.py has a thousand."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import kills, tiny
from tests.dies import Death, word_of
from tests.forked import Forks
from tests.kill_stories import TRAINING, of_output, training


def test_words_name_what_outlives_a_process() -> None:
    root = "/tmp/x"
    assert word_of("os.rename", (f"{root}/.unfinished-00000003", f"{root}/step-00000003", -1, -1), root) == (
        "os.rename .unfinished-# step-#"
    )
    assert word_of("open", (f"{root}/a.1234.unfinished", "wb", os.O_WRONLY), root) == "open a.#.unfinished"
    assert word_of("open", (f"{root}/a", "rb", os.O_RDONLY), root) is None
    assert word_of("open", ("/elsewhere/a", "wb", os.O_WRONLY), root) is None
    assert word_of("os.remove", ("a.json", 5), root) == "os.remove a.json"  # rmtree's, by the folder's descriptor
    assert word_of("socket.bind", (None, ("127.0.0.1", 0)), root) == "socket.bind"


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks | None]:
    """What lives begin from: on Linux forks, which are quicker than programs."""
    source = Forks(tmp_path_factory.mktemp("forks")) if sys.platform == "linux" else None
    yield source
    if source is not None:
        source.close()


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        # Where a checkpoint gets its name, and then while an old one goes.
        ("one rank, full", [(0, "os.rename .unfinished-# step-#", 2), (0, "os.rmdir .unfinished-step-#", 1)]),
        ("synchronous", [(1, "open rank-#.jsonl", 1), (0, "os.rename .unfinished-# step-#", 2)]),
    ],
)
def test_a_run_that_is_killed_has_the_same_end(
    name: str, moments: list[tuple[int, str, int]], forks: Forks | None, tmp_path: Path
) -> None:
    story = training(tmp_path / "base", *TRAINING[name])
    whole = kills.Whole.of(story, tmp_path / "whole", forks)
    case = tmp_path / "case"
    for rank, word, count in moments:
        assert whole.words[rank][word] >= count, sorted(whole.words[rank])
        deaths = kills.nobody_dies(story, case)
        deaths[rank] = dataclasses.replace(deaths[rank], word=word, count=count)
        assert not kills.live(story, case, deaths, None, forks), "nobody died"
    assert kills.live(story, case, kills.nobody_dies(story, case), None, forks)
    assert story.outcome(case) == whole.outcome, kills.difference(whole.outcome, story.outcome(case))


def test_what_a_kill_changes_is_seen(tmp_path: Path) -> None:
    """A command that does not go on is told from one that does."""
    program = tmp_path / "torn.py"
    program.write_text(
        "import pathlib, sys\nout = pathlib.Path(sys.argv[1])\nwith out.open('a') as file:\n    file.write('1')\n"
        "    file.flush()\n    out.with_name('b').touch()\n    file.write('2')\n"
    )
    story = of_output("done", lambda folder: [str(program), f"{folder}/a"])
    story = dataclasses.replace(story, outcome=lambda folder: (folder / "a").read_text())
    whole = kills.Whole.of(story, tmp_path / "whole")
    assert whole.outcome == "12" and "open b" in whole.words[0]
    cases = [kills.play("torn", story, whole, tmp_path / f"case{seed}", random.Random(seed)) for seed in range(8)]
    for case in cases:  # whoever died between the two writes
        if "after" in case.moments:
            continue  # by the clock: on a busy machine nobody knows where that was
        is_torn = any(kill.moment.startswith("open b") for kill in case.kills)
        assert (case.fault is not None and "its end differs: 12 is 1" in case.fault) == is_torn, case
    assert any(case.fault for case in cases)


def test_a_process_that_is_left_behind_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import pathlib, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', "
        "sys.argv[1] + '/x'])\npathlib.Path(sys.argv[1], 'a').touch()\n"
    )
    story = of_output("done", lambda folder: [str(program), str(folder)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kills, "ORPHAN_SECONDS", 0.5)
        with pytest.raises(kills.Fault, match="left processes behind"):
            kills.Whole.of(story, tmp_path / "whole")


def test_a_death_is_a_kill(tmp_path: Path) -> None:
    death = Death(str(tmp_path), str(tmp_path / "trace"), word="open out", count=1)
    program = tmp_path / "writes.py"
    program.write_text(f"open({str(tmp_path / 'out')!r}, 'w').write('x')\n")
    command = [sys.executable, "-m", "tests.dies", death.to_json(), str(program)]
    assert subprocess.run(command, cwd=tiny.ROOT).returncode == -9
    assert not (tmp_path / "out").exists() and (tmp_path / "trace").read_text().startswith("begin\nopen out\n")
