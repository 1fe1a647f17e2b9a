"""What is printed to be typed can be pasted into zsh, macOS's shell, as it stands: documents, --help, comments, remedies.

An interactive zsh takes `# a comment` behind a command for words (and `#` for a pattern), an apostrophe for the beginning
of a string, and a bare `[12,4]`, `*` or `?` for a pattern that has to match a file. Where zsh is installed it is asked
itself; otherwise, and besides, a few lines here know as much of its grammar.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.launch import preflight_verdicts
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.run_needs import Needs
from tests.sources import strings
from tests.tiny import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS = r"(?:make|\./launch|\.venv/bin/\S+|python|mpirun|ssh|sudo|rsync|mlx\.\w+|sysctl|rm|cp|hf|pip|brew)"


def fault_of(line: str) -> str | None:
    """What zsh would not take as it stands; None if it takes all."""
    quote, before = "", " "
    for position, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "*?[]" and before != "\\":
            return f"{letter} outside of quotes, at {line[position - 10 : position + 10]!r}"
        elif letter == "#" and before.isspace():
            return "a comment"
        before = letter
    return f"a {quote} without its end" if quote else None


def test_the_grammar_knows_what_breaks() -> None:
    for good in (
        "make test",
        "a 'plan.shares=[12,4]' \"x?\"",
        "rsync --include='*.py' a/ b:c/",
        r"a \*",
        "du -sh $HOME/#x",
    ):
        assert fault_of(good) is None, good
    for bad in (
        "make test   # all",
        "# make",
        "a plan.shares=[12,4]",
        "ls *.py",
        "it's",
        "is it on?",
        'a "b',
        "rm x/*",
    ):
        assert fault_of(bad) is not None, bad


# ---- Where commands stand


def of_documents() -> Iterator[tuple[str, str]]:
    """(place, command) of every fenced sh block, every indented command, and every command inside a sentence."""
    for path in [*DOCUMENTS, ROOT / "hostfile.example", *sorted((ROOT / "configs").glob("*.yaml"))]:
        in_block, is_shell = False, False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            place = f"{path.name}:{number}"
            if line.startswith("```"):
                in_block, is_shell = not in_block, not in_block and line.startswith("```sh")
            elif is_shell and line.strip():
                yield place, line
            elif found := re.fullmatch(rf"#? {{4,}}({PROGRAMS} .*)", line):
                yield place, found[1]
            elif not in_block:
                for code in re.findall(rf"`({PROGRAMS} [^`]+)`", line):
                    if "..." not in code:
                        yield place, without_options(code)


def without_options(synopsis: str) -> str:
    """A command without the [--words WORD] that it may have besides."""
    return re.sub(r" \[(?:--|key=)[^\]]*\]", "", synopsis)


def of_help() -> Iterator[tuple[str, str]]:
    """Commands of what --help prints; behind them, in a second column, stands what they do."""
    for script in (["train.py"], ["launch"], ["-m", "lib.doctor"], ["-m", "lib.dashboard"], ["-m", "lib.evaluate"]):
        done = subprocess.run([sys.executable, *script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            if found := re.match(rf" *({PROGRAMS} .*?)(?: {{3,}}|$)", line):
                yield f"{script[-1]} --help", without_options(found[1])


def of_docstrings() -> Iterator[tuple[str, str]]:
    """Commands that modules' docstrings show."""
    for path in [ROOT / "train.py", *sorted((ROOT / "lib").rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]:
        for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines():
            if found := re.match(rf" {{4,}}({PROGRAMS} .*?)(?: {{3,}}|$)", line):
                yield path.name, without_options(found[1])


def of_remedies() -> Iterator[tuple[str, str]]:
    """The commands of every verdict that there is, on a Linux host and on a Mac."""
    hosts = (Host("mac-a", 2), Host("mac-b", 2, (), (None, "rdma_en5")))
    needs = Needs(("data.jsonl", "model", "gone"), ("org/model",), "runs", "calibration", True, "full", 3)
    here = {"project": {"lib/a.py": "1"}, "packages": {"python": "3.12", "mlx": "1"}}
    here["files"] = {"data.jsonl": "1", "model": "2", "gone": None}  # type: ignore[dict-item]
    for system, home in (("Linux", "/home/me/tandem"), ("Darwin", "/Users/me/Documents/it's here")):
        systems = {"mac-a": "Linux", "mac-b": system}
        typed = ("--hosts", "mac-a:2,mac-b", "--", "train.py", "plan.shares=[12,4]")
        job = Job(hosts, "jaccl", typed[3:], directory=home, typed=typed)
        context = preflight_verdicts.Context(here, needs, job, 2**40, systems)
        facts = {
            "ssh_to": {
                f"h{n}": said for n, said in enumerate(["Permission denied", "host key", "refused", "resolve", "x"])
            },
            "system": system,
            "project": {"lib/a.py": "2"},
            "packages": {"python": "3.11"},
            "files": {"data.jsonl": "2", "model": {"fault": "Operation not permitted"}, "gone": None},
            "models": {"org/model": False},
            "memory": {"free_bytes": 1},
            "disk": {"folder": f"{home}/runs", "fault": "Operation not permitted", "free_bytes": 1},
            "ports": [32323],
            "calibration": {"there": False},
            "clock": {"ahead_seconds": 60.0, "unsure_seconds": 0.1},
            "load": {"average": 4.0, "cpus": 2, "training": [77, "train.py"]},
            "rdma": {"devices": []},
        }
        assert facts.keys() == {fact for fact, _ in preflight_verdicts.FACT_CHECKS.values()}
        full = {**facts, "disk": {"folder": f"{home}/runs", "fault": None, "free_bytes": 1}}
        late = dict.fromkeys(facts, {"error": "PermissionError: Operation not permitted: '/Users/me/Desktop/x'"})
        for answer in (facts, full, late, dict.fromkeys(facts, {"error": "no answer within 10 s"})):
            for found in preflight_verdicts.findings_of([hosts[1]], {"mac-b": answer}, context):  # type: ignore[dict-item]
                yield f"{found.check} on {system}", found.remedy
        links = {
            ("mac-a", "mac-b"): {"error": "refused"},
            ("a", "b"): {"bytes_per_second": 1.0, "round_trip_seconds": 9},
        }
        for found in preflight_verdicts.link_findings(links, 1e6, 0.1, context):  # type: ignore[arg-type]
            yield "links", found.remedy


@pytest.mark.long
def test_every_command_is_taken_as_it_stands() -> None:
    places = {"documents": of_documents, "help": of_help, "docstrings": of_docstrings, "remedies": of_remedies}
    found = {name: [(place, line) for place, line in each() if line] for name, each in places.items()}
    assert all(len(each) > 5 for each in found.values()), {name: len(each) for name, each in found.items()}
    faults = [
        f"{place}: {fault}: {line}" for each in found.values() for place, line in each if (fault := fault_of(line))
    ]
    assert not faults, "\n".join(faults)


def test_no_message_has_a_comment_behind_a_command() -> None:
    """The old form of remedies, in any string of ours: `ssh HOST uptime    # is it overloaded?`"""
    for path in [ROOT / "train.py", ROOT / "launch", *sorted((ROOT / "lib").rglob("*.py"))]:
        for text in strings(path):
            assert not re.search(r"\S {2,}# \w", text), f"{path.name}: {text!r}"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed; the grammar above was asked")
def test_an_interactive_zsh_hears_the_words_that_are_meant(tmp_path: Path) -> None:
    lines = [line for each in (of_documents, of_remedies) for _, line in each() if line]
    simple = [line for line in lines if not re.search(r"[|&;<>$~]", line) and len(line) < 900]
    assert len(simple) > 80
    script = "".join(f"print -rN -- {line}; print -rN -- END\n" for line in simple)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PS1": "", "PS2": "", "LC_ALL": "C.UTF-8"}
    # -f: nobody's own start files; -i: as at a prompt, where comments are off
    asked = subprocess.run(
        ["zsh", "-f", "-i"], input=script, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60
    )
    heard = [each.split("\0")[:-1] for each in asked.stdout.split("END\0")[:-1]]
    for line, words in zip(simple, heard, strict=True):
        assert words == shlex.split(line), f"{line}: zsh hears {words}; {asked.stderr[-300:]}"
    complex_lines = [line for line in lines if line not in simple]
    for line in complex_lines:
        checked = subprocess.run(["zsh", "-f", "-n", "-c", line], capture_output=True, text=True, env=environment)
        assert checked.returncode == 0, f"{line}: {checked.stderr}"
