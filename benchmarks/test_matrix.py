"""The tests as other machines see them: kernels of other CPUs, two BLAS threads, busy cores, an ordinary user, odd paths, locales.

    python benchmarks/test_matrix.py                        all tests under all settings: hours; make test-matrix
    python benchmarks/test_matrix.py --quick                the numerics alone, under every kind of kernel: minutes
    python benchmarks/test_matrix.py --rows Haswell --rows umask tests/test_data.py
    python benchmarks/test_matrix.py --table                what has been run so far, as docs/testing.md has it

Every row has a fresh clone of the last commit in a temporary folder, which goes with it. It uses this checkout's
environment, or one of its own where that cannot be (another Python, another user). What cannot be tried here says why.
Without test files: --tests all (the default), near (all but what takes minutes) or numerics.

Each row is kept in build/test-matrix.jsonl as soon as it is known. The same command goes on where it was stopped: rows
that passed on this commit, with these tests, are not run again (--again does). What a row with failures printed is
kept beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import lib  # noqa: E402, F401  goes on in .venv, or says in one line what to do
from benchmarks.busy import busy_processes  # noqa: E402
from tests.parts import END_SECONDS  # noqa: E402

CORE_TYPES = ("Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX")
USER = "nobody"  # who runs the tests where this is root
NUMERICS = (
    "forward",
    "step",
    "losses",
    "merge",
    "shapes",
    "window",
    "compression",
    "train",
    "rounds",
    "bulk",
    "runtime",
)
NUMERICS_OF_RANKS = ("world", "apart", "shard", "choice", "replan", "streaming")
NEAR = (
    "config",
    "data",
    "data_order",
    "hostfile",
    "inspection",
    "channel",
    "local_launch",
    "plan",
    "sinks",
    "terminal",
    "history",
)
# As the Makefile has it: Open MPI starts as root, and more ranks than cores.
MPI = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
MPI |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
SETUP_SECONDS, ROW_SECONDS = 1200, 5400
RECORD = ROOT / "build/test-matrix.jsonl"


class NotHere(Exception):
    """This setting cannot be tried on this machine; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What is different from a plain `make test` or `make test-long`."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    busy: int = 0
    folder: str = "clone"
    umask: int = -1
    user: str | None = None
    python: str | None = None  # of an environment of its own
    why_not: str | None = None


@dataclass
class Result:
    """What became of the tests; `not_run` says why nothing did."""

    name: str
    tests: str = ""
    commit: str = ""
    date: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    not_run: str | None = None
    failures: list[str] = field(default_factory=list)
    output: str | None = None  # the file that has all of it, where something failed


# ---- Which settings there are


def settings_here(folder: Path) -> list[Setting]:
    """Every setting, in order; `folder` may be given a locale."""
    found = [core_setting(core, threads) for core in CORE_TYPES for threads in (1, 2)]
    found += [Setting("busy: three processes beside", busy=3), user_setting()]
    found += [Setting("path: a space and an umlaut", folder="Zwei Wörter")]
    found += [Setting("locale: C", {"LANG": "C", "LC_ALL": "C"}), turkish_setting(folder)]
    found += [Setting("umask: 077", umask=0o077), Setting("time zone: Pacific/Chatham", {"TZ": "Pacific/Chatham"})]
    return found + python_settings()


def core_setting(core: str, threads: int) -> Setting:
    """OpenBLAS with another CPU's kernels. It chooses them at its start, and dies where the CPU lacks their instructions."""
    environment = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": str(threads)}
    why_not = None
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        why_not = "OpenBLAS's kernels for x86-64 on Linux alone"
    elif (missing := {"SkylakeX": "avx512f", "Haswell": "avx2", "Zen": "avx2"}.get(core, "sse4_2")) not in cpu_flags():
        why_not = f"this CPU has no {missing}"
    return Setting(f"kernels: {core}, {threads} thread{'s' * (threads > 1)}", environment, why_not=why_not)


def cpu_flags() -> set[str]:
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(flags[1].split()) if flags else set()


def user_setting() -> Setting:
    if os.geteuid() != 0:
        return Setting("user: an ordinary one", why_not="who runs this is one already")
    try:
        pwd.getpwnam(USER)
    except KeyError:
        return Setting("user: an ordinary one", why_not=f"no user {USER}")
    if shutil.which("setpriv") is None:
        return Setting("user: an ordinary one", why_not="no setpriv (util-linux)")
    return Setting("user: an ordinary one", user=USER)


def turkish_setting(folder: Path) -> Setting:
    """Where "I".lower() is not "i" for whoever asks the C library."""
    name, locale = "locale: tr_TR.UTF-8", "tr_TR.UTF-8"
    environment = {"LANG": locale, "LC_ALL": locale}
    known = subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout if shutil.which("locale") else ""
    if "tr_TR.utf8" in known.split() or sys.platform == "darwin":
        return Setting(name, environment)
    if shutil.which("localedef") is None:
        return Setting(name, why_not="neither this locale nor localedef is here")
    made = subprocess.run(
        ["localedef", "-i", "tr_TR", "-f", "UTF-8", str(folder / locale)], capture_output=True, text=True
    )
    if not (folder / locale).is_dir():
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Setting(name, why_not=f"localedef cannot make it (Debian: apt-get install locales): {reason}")
    return Setting(name, environment | {"LOCPATH": str(folder)})


def python_settings() -> list[Setting]:
    """Every other minor version of Python from 3.11 that is found, the newest of each."""
    candidates = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        candidates += sorted(map(str, Path(root).glob("versions/3.*/bin/python3")))
    candidates += sorted(map(str, Path("/usr/bin").glob("python3.??")))
    newest: dict[tuple[int, int], tuple[tuple[int, ...], str]] = {}
    for path in filter(None, candidates):
        said = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:3])"], capture_output=True, text=True)
        version = tuple(map(int, said.stdout.split())) if said.returncode == 0 else (0, 0)
        if version >= (3, 11) and version[:2] != sys.version_info[:2]:
            newest[version[:2]] = max(newest.get(version[:2], ((0,), "")), (version, path))
    if not newest:
        return [Setting("python: another", why_not="no other Python from 3.11 is found")]
    return [Setting(f"python: {'.'.join(map(str, v))}", python=path) for _, (v, path) in sorted(newest.items())]


# ---- One setting


def command_of(options: argparse.Namespace, python: str) -> list[str]:
    """All tests, or what was chosen of them, in the parts of `make test`, beside each other."""
    plain, of_ranks = options.files, [file for file in options.files if "mark.mpi" in (ROOT / file).read_text()]
    if not plain and options.tests != "all":
        names = NUMERICS + (NEAR if options.tests == "near" else ())
        plain, of_ranks = [[f"tests/test_{name}.py" for name in each] for each in (names, NUMERICS_OF_RANKS)]
    everything = not plain
    seed = [f"--hypothesis-seed={options.seed}"]
    workers = ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    plain_part = [python, "-m", "pytest", *workers, "-p", "no:cacheprovider", *seed, *plain]
    mpirun = str(Path(python).parent / "mpirun")
    parts = [python, "-m", "tests.parts", "one process", *plain_part]
    ranks = {"two ranks": "2", "three ranks": "3"} if not options.quick and (everything or of_ranks) else {}
    for name, number in ranks.items():
        of_one = [python, "-m", "pytest", "-x", "-p", "no:cacheprovider", *seed, *of_ranks]
        parts += ["--", name, mpirun, "-n", number, *of_one]
    return parts


def tried(setting: Setting, options: argparse.Namespace, folder: Path) -> Result:
    """The tests under one setting, in a clone of its own below `folder`."""
    date, began = f"{datetime.now(UTC):%Y-%m-%d}", time.monotonic()
    result = Result(setting.name, tests_of(options), commit_here(), date)
    try:
        if setting.why_not:
            raise NotHere(setting.why_not)
        clone, run = prepared(setting, folder)
        with busy_processes(setting.busy):
            status, output = run(command_of(options, str(clone / ".venv/bin/python")), ROW_SECONDS)
        count(result, status, output)
        if result.failed:
            result.output = kept_output(result, output)
    except NotHere as reason:
        result.not_run = str(reason)
    result.seconds = time.monotonic() - began
    return result


def kept_output(result: Result, output: str) -> str:
    """The file of what the tests of a row printed, from the project's folder."""
    file = RECORD.parent / f"{RECORD.stem}-{re.sub('[^A-Za-z0-9.]+', '-', result.name)}.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text(output)
    return str(file.relative_to(ROOT))


def prepared(setting: Setting, folder: Path) -> tuple[Path, Callable[[list[str], float], tuple[int, str]]]:
    """A clone with an environment, and what runs a command in it as the setting wants it.

    Raises:
        NotHere: it gets no environment.
    """
    home, clone = folder / "home", folder / setting.folder
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    environment = {**MPI, **os.environ, "TMPDIR": str(folder / "tmp"), **setting.environment}
    for name in ("PYTEST_ADDOPTS", "PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL"):
        environment.pop(name, None)
    (folder / "tmp").mkdir()
    become: list[str] = []
    if setting.user:
        user = pwd.getpwnam(setting.user)
        become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        environment |= {"HOME": str(home), "USER": setting.user, "LOGNAME": setting.user}
        subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(folder)], check=True)

    def run(command: list[str], seconds: float) -> tuple[int, str]:
        return ran([*become, *command], clone, environment, setting.umask, seconds)

    ours = ROOT / ".venv"
    starts_itself = "import subprocess, sys, mlx_lm; subprocess.run([sys.executable, '-c', ''], check=True)"
    if setting.python is None and run([str(ours / "bin/python"), "-c", starts_itself], 60)[0] == 0:
        (clone / ".venv").symlink_to(ours)
    else:
        chosen = [f"PYTHON={setting.python}"] if setting.python else []
        status, output = run(["make", "setup", *chosen], SETUP_SECONDS)
        if status:
            raise NotHere(f"make setup failed: {(output.strip().splitlines() or ['no output'])[-1][:160]}")
    return clone, run


def ran(command: list[str], folder: Path, environment: dict[str, str], umask: int, seconds: float) -> tuple[int, str]:
    """A command's status and output. It leaves no process behind: what it started is ended with it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            umask=umask,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            output.write(f"\nended after {seconds:g} s\n")
            status = -signal.SIGTERM
        finally:
            process.terminate()  # tests/parts.py ends its parts, whose sessions are their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3 * END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def count(result: Result, status: int, output: str) -> None:
    """Adds what pytest's closing line says of each part, and the names of what failed; an end without one is a failure."""
    output = re.sub(r"\033\[[0-9;]*m", "", output)
    before = result.failed
    parts = re.split(r"^(?=\S+ .*-m pytest )", output, flags=re.MULTILINE)  # tests/parts.py shows each one's command
    for part in parts[1:] or parts:
        closing = re.findall(
            r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error|deselected).* in [\d.]+s.*)$", part, re.MULTILINE
        )
        counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
        for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", closing[-1] if closing else ""):
            counts[kind] += int(number)
        result.passed += counts["passed"]
        result.skipped += counts["skipped"]
        result.failed += counts["failed"] + counts["error"] + (not closing)
        names = re.findall(r"^(?:FAILED|ERROR) (\S.*)$", part, re.MULTILINE)
        if not closing and not names:
            names = [f"status {status}: {(part.strip().splitlines() or ['no output'])[-1]}"]
        result.failures += [name for name in dict.fromkeys(names) if name not in result.failures]
    no_tests = {"5"} == {
        *re.findall(r"^failed in .+, status (\d+):", output, re.MULTILINE)
    }  # of chosen files, for so many ranks
    if status and result.failed == before and not no_tests:
        result.failed += 1
        result.failures.append(f"status {status}: {(output.strip().splitlines() or ['no output'])[-1]}")


# ---- All of them


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="the numerics of one process, under every kind of kernel, one thread"
    )
    parser.add_argument("--seed", type=int, default=0, help="of Hypothesis")
    parser.add_argument("--rows", action="append", default=[], metavar="NAME", help="those whose names have this")
    parser.add_argument("--tests", choices=("all", "near", "numerics"), default="all")
    parser.add_argument("--list", action="store_true", help="the rows' names, and no more")
    parser.add_argument("--again", action="store_true", help="also rows that have passed on this commit")
    parser.add_argument("--table", action="store_true", help="every row's last result, as Markdown, and no more")
    parser.add_argument("files", nargs="*", help="test files instead")
    options = parser.parse_args(words)
    if missing := [file for file in options.files if not (ROOT / file.partition("::")[0]).is_file()]:
        parser.error(f"{missing[0]} is not there; files are given from the project's folder, as tests/test_data.py")
    if options.quick:
        options.tests, options.rows = "numerics", options.rows or ["1 thread"]
    if options.table:
        print(*markdown(recorded()), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="test-matrix-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        chosen = [s for s in settings_here(folder) if not options.rows or any(part in s.name for part in options.rows)]
        if not chosen:
            parser.error(f"no row has {' or '.join(options.rows)} in its name; --list shows them")
        if options.list:
            print(*(f"{s.name}{f' (not here: {s.why_not})' if s.why_not else ''}" for s in chosen), sep="\n")
            return 0
        if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True).stdout.strip():
            print("note: what is not committed is not in the clones", file=sys.stderr)
        for number in (signal.SIGTERM, signal.SIGHUP):  # as at Ctrl-C, which is ignored behind a shell's &
            signal.signal(number, signal.default_int_handler)
        try:
            results = table(chosen, options, folder)
        except KeyboardInterrupt:
            print("stopped; the same command goes on with the rows that are left", file=sys.stderr)
            return 128 + signal.SIGINT
    failed = sum(result.failed for result in results)
    print(
        json.dumps(
            {"benchmark": "test_matrix", "seed": options.seed, "failed": failed, "settings": [vars(r) for r in results]}
        )
    )
    return int(failed > 0)


def table(chosen: Sequence[Setting], options: argparse.Namespace, folder: Path) -> list[Result]:
    """Tries every setting, prints its row as soon as it is known, and keeps it."""
    print(f"{'row':32} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    results: list[Result] = []
    for number, setting in enumerate(chosen):
        result = None if options.again else passed_before(recorded(), setting.name, tests_of(options), commit_here())
        known = result is not None
        if result is None:
            place = folder / str(number)
            place.mkdir(mode=0o755)
            result = tried(setting, options, place)
            shutil.rmtree(place, ignore_errors=True)
            keep(result)
        results.append(result)
        figures = f"{result.passed:7} {result.failed:7} {result.skipped:8} {result.seconds:8.0f}"
        figures += f"   as on {result.date}" if known else ""
        print(f"{result.name:32} {f'not run: {result.not_run}' if result.not_run else figures}", flush=True)
        for failure in result.failures:
            print(f"    {failure}", flush=True)
        if result.output:
            print(f"    all that they printed: {result.output}", flush=True)
    return results


# ---- What has been run


def tests_of(options: argparse.Namespace) -> str:
    """Which tests a row is of, in words."""
    chosen = " ".join(options.files) if options.files else str(options.tests)
    return f"{chosen}, one process" if options.quick else chosen


def commit_here() -> str:
    """The commit that clones are of."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def recorded() -> list[Result]:
    """All rows that were kept, the oldest first. A line that was cut off is none."""
    results = []
    for line in RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []:
        with contextlib.suppress(ValueError, TypeError):
            results.append(Result(**json.loads(line)))
    return results


def keep(result: Result) -> None:
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def passed_before(results: Sequence[Result], name: str, tests: str, commit: str) -> Result | None:
    """The newest result of a row with these tests on this commit, where it was run and nothing failed."""
    same = [one for one in results if (one.name, one.tests, one.commit) == (name, tests, commit) and not one.not_run]
    return same[-1] if same and not same[-1].failed else None


def markdown(results: Sequence[Result]) -> list[str]:
    """The newest result of each row and choice of tests."""
    newest = {(one.name, one.tests): one for one in results}
    lines = ["| row | tests | passed | failed | skipped | seconds | commit | date |", "|" + "---|" * 8]
    for one in newest.values():
        figures = (
            ["not run: " + one.not_run, "", "", ""]
            if one.not_run
            else [one.passed, one.failed, one.skipped, round(one.seconds)]
        )
        lines.append("| " + " | ".join(map(str, [one.name, one.tests, *figures, one.commit, one.date])) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
