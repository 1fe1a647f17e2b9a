"""What the documents say can be done can be done: every command, every link, every setting.

Commands stand in fenced blocks, one a line: ```sh is run here (trainings on a tiny model, two steps); ```sh on hosts, on ranks,
on a Mac, and with yours (your model, your run) want what no test has: their words are read by the program that would get
them, and nothing starts.
Indented lines that begin with one of our programs are read in the same way.
"""

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

from lib.config import command_line, help, load
from lib.launch import command as launch_options
from lib.launch import command as launcher
from tests import tiny
from tests.tiny import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OURS = ("make ", "./launch ", ".venv/bin/", "python ")
QUICKSTART = command_line.QUICKSTART


class Command(NamedTuple):
    place: str  # document:line
    needs: str  # what stands behind ```sh, or "indented"
    words: list[str]


def commands(path: Path) -> list[Command]:
    found, needs = [], None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = re.fullmatch(r"```(\w*) ?(.*)", line)
        if fence:
            needs = None if needs is not None or fence[1] != "sh" else fence[2]
        elif needs is not None or line.startswith(tuple(f"    {program}" for program in OURS)):
            said = line if needs is not None else line.strip().split("    ")[0]  # what it does stands beside it
            if words := shlex.split(said, comments=True):
                words = words[: next((i for i, word in enumerate(words) if word in ("|", ">")), len(words))]
                found.append(Command(f"{path.name}:{number}", "indented" if needs is None else needs, words))
    return found


def seeds() -> list[Command]:
    """Ours in the table that translates commands of earlier documents; they start on hosts that no test has."""
    lines = (ROOT / "docs/best_practices.md").read_text().partition("| their command | here |")[2].splitlines()
    ours = [shlex.split(re.findall("`([^`]+)`", line)[1]) for line in lines if "`" in line]
    as_root = [words[4:] if words[0] == "sudo" else words for words in ours]  # sudo nice -n -10
    return [Command("best_practices.md:here", "on hosts", words) for words in as_root]


COMMANDS = [*(one for path in DOCUMENTS for one in commands(path)), *seeds()]


def test_the_documents_have_commands_and_say_what_those_need() -> None:
    assert len(COMMANDS) > 20
    assert {one.needs for one in COMMANDS} <= {"", "indented", "on hosts", "on ranks", "on a Mac", "with yours"}


@pytest.mark.parametrize("one", COMMANDS, ids=lambda one: f"{one.place} {' '.join(one.words)[:60]}")
def test_a_documented_command(one: Command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    check(one.words, one.needs, tmp_path)


def check(words: list[str], needs: str, folder: Path) -> None:
    """Runs a command as far as it goes here, or has its words read by the program that would get them."""
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        check_make(words[1:], needs, folder)
    elif program == "mpirun":
        check(words[next(i for i, word in enumerate(words) if word.endswith("python")) :], "several ranks", folder)
    elif program == "./launch":
        check_launch(words[1:])
    elif program == "python" and words[1] == "train.py":
        check_train(words[2:], needs, folder)
    elif program == "python" and words[1] == "-m" and not words[2].startswith("lib."):
        assert importlib.util.find_spec(words[2].split(".")[0]), words[2]
    elif program == "python" and words[1] != "-c":
        script, rest = (words[1:3], words[3:]) if words[1] == "-m" else (words[1:2], words[2:])
        knows_options(help_of(*script), rest)
    elif program in ("mlx.distributed_config", "mlx.launch"):
        knows_options(help_of(str(Path(sys.executable).parent / program)), words[1:])
    elif program == "cp":
        assert (ROOT / words[1]).exists()
    elif program == "curl" or needs in ("on hosts", "on a Mac"):  # nobody's here: is it a shell's command at all?
        assert subprocess.run(["bash", "-n", "-c", shlex.join(words)]).returncode == 0
    elif program not in ("ruff", "mypy", "git"):
        pytest.fail(f"{words}: no test knows how to run it; say what it needs (sh on hosts, sh on a Mac)")


def check_make(words: list[str], needs: str, folder: Path) -> None:
    """The target exists, and what it would run is a command that can be run; but it sets nothing up."""
    # `make test ARGS=...` is not its parent.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"}
    command = ["make", "-n", "-o", "setup", *words]
    dry = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    if words[0] in ("setup", "clean", "test", "test-long", "lint", "coverage", "docs", "help"):
        return  # these are rules of our own, and CI runs them
    for line in dry.stdout.splitlines():
        check(shlex.split(line), needs, folder)


def check_launch(words: list[str]) -> None:
    words = [word for word in words if word != "..."]
    if "--help" in words:
        assert "usage: launch" in help_of("launch")
        return
    options = launch_options.parse(words)
    if options.command[0] == "train.py":
        check_train(options.command[1:], "on hosts", Path())
    if options.emit:  # nobody is asked here
        words = ["--hosts", "mac-a:1,mac-b:1", "--emit", options.emit, "--no-preflight", "--", *options.command]
        assert launcher.main(words) == 0


def check_train(words: list[str], needs: str, folder: Path) -> None:
    example = {"...": QUICKSTART, "configs/X.yaml": QUICKSTART}
    words = [example.get(word, word) for word in words]
    if "--help" in words:
        assert "train.learning_rate=" in help_of("train.py")
        return
    options = command_line.train_options(words, "")
    if options.resume:
        assert {word.partition("=")[0] for word in options.overrides} <= {k for k, *_ in help.settings()}
        return
    load.load(ROOT / (options.config or QUICKSTART), options.overrides)
    if needs == "":  # for real, on a model that takes a second
        theirs = ("--config", "configs/", "model.", "data.", "train.steps=")
        ours = [word for word in words if not word.startswith(theirs)]
        tiny.train(folder, [*tiny.settings(folder), "train.steps=2", "evaluate.samples=0", *ours])


@functools.cache
def help_of(*script: str) -> str:
    result = subprocess.run([sys.executable, *script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{script}: {result.stderr}"
    return result.stdout


def knows_options(text: str, words: list[str]) -> None:
    settings = {key for key, *_ in help.settings()}
    for word in words:
        if word.startswith("-"):
            assert re.search(rf"(^|[\s\[,]){re.escape(word.partition('=')[0])}\b", text), f"{word} is no option"
        elif re.match(r"[a-z_]+\.[a-z_]+=", word):
            assert word.partition("=")[0] in settings, f"{word} is no setting"


def test_settings_that_the_documents_name_exist() -> None:
    known = {key for key, *_ in help.settings()}
    sections = {key.partition(".")[0] for key in known if "." in key}
    for path in DOCUMENTS:
        for name in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_]+)\b", path.read_text()):
            is_file = name.endswith((".py", ".json")) or name == "data.lengths"
            assert name in known or is_file, f"{path.name}: {name} is no setting"


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http:", "https:")):
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./#%-]*)?", target), target
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        assert other.exists() and other.is_relative_to(ROOT), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(other.read_text()), f"{path.name}: {target}"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids.add(given.get("id") or "")
        if tag == "a" and given.get("href"):
            self.links.add(str(given["href"]))


def check_reference(folder: Path) -> None:
    pages = {path.resolve(): Page(path.read_text()) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            name, _, anchor = link.partition("#")
            if not link.startswith(("http:", "https:")):
                other = (path.parent / name).resolve() if name else path
                assert other in pages, f"{path.name}: {link}"
                # Within a page pdoc names the members of private bases, too, which it leaves out.
                assert other == path or not anchor or anchor in pages[other].ids, f"{path.name}: {link}"


def test_the_reference_is_built_and_its_links_lead_somewhere(tmp_path) -> None:
    """Of some modules; of all for `make docs`, which has just built them and CI runs: they take ten seconds to read."""
    recipe = subprocess.run(["make", "-n", "-o", "setup", "docs"], cwd=ROOT, capture_output=True, text=True).stdout
    words = shlex.split(next(line for line in recipe.splitlines() if "pdoc" in line))
    words = [sys.executable, *words[1 : words.index("--output-directory")], "--output-directory", str(tmp_path)]
    words += ["lib.plan.shares", "lib.launch.hostfile"]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    assert {path.stem for path in (tmp_path / "lib").glob("*/*.html")} == {"shares", "hostfile"}
    check_reference(tmp_path)
    if "REFERENCE" in os.environ:
        check_reference(ROOT / os.environ["REFERENCE"])
