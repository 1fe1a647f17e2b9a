"""Runs, host files, keys and environments of somebody else: each line an attack, as in tests/attacks.py."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lib.dashboard import rounds
from lib.dashboard.history import RunHistory
from lib.data.index import ENTRY
from lib.errors import UserError, shown
from lib.export import push_checks
from lib.launch import hostfile
from lib.serve import api_keys
from lib.system import network, out_of_memory
from lib.training.checkpoint import MANIFEST, REFERENCE, STATE
from lib.training.run_folder import own_folder
from tests import tiny
from tests.attacks import PAIR, Attack, agree, copy_of_run, of_words, refused, run_of, set_in, training
from tests.attacks_models import DEEP, Content, huge, link_to, pipe, put

VICTIM = "a line that somebody needs\n"
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
RESUMED = "train.steps=3"


def of_folder(change: Callable[[Path, Path], None], program: str = "train.py", *words: str) -> Attack:
    """A run's folder that somebody changed, given to a command: it goes well or is refused, and nobody's file is touched.

    change: gets the run, and a file outside of it.
    """

    def attack(folder: Path) -> str | None:
        victim = folder / "victim"
        shutil.rmtree(victim, ignore_errors=True)
        victim.mkdir()
        (victim / "file").write_text(VICTIM)
        with copy_of_run(folder) as run:
            change(run, victim / "file")
            given = [word.format(run=run, d=folder) for word in words] or ["--resume", str(run), RESUMED]
            status, _, errors = run_of(program, given)
        if (victim / "file").read_text() != VICTIM or len(list(victim.iterdir())) > 1:
            return f"it wrote outside of the run: {[path.name for path in victim.iterdir()]}"
        lines = [line for line in errors.splitlines() if line and not line.startswith("warning: ")]
        is_clear = status == 0 or (status == 2 and len(lines) == 1 and lines[0] == shown(lines[0]))
        return None if is_clear else f"status {status}: {errors[-300:]}"

    return attack


def in_place_of(name: str, kind: str) -> Callable[[Path, Path], None]:
    """A file of a run that is a link, a hard link, a pipe or never ends."""

    def change(run: Path, victim: Path) -> None:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            path.symlink_to(victim)
        elif kind == "folder":
            path.symlink_to(victim.parent)
        elif kind == "hard link":
            path.hardlink_to(victim)
        else:
            put(path, {"pipe": pipe, "huge": huge}.get(kind) or link_to("/dev/zero"))

    return change


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def of_checkpoint(change: Callable[[Path], None], is_agreed: bool = True) -> Attack:
    """The newest checkpoint of a run, changed, with hashes that agree: the one before it is taken, or one line said."""

    def altered(run: Path, victim: Path) -> None:
        change(newest(run))
        if is_agreed:
            agree(newest(run))

    return of_folder(altered)


def of_arrays(file: str, change: Callable[[dict[str, mx.array]], object]) -> Attack:
    """The arrays of the newest checkpoint, changed, with hashes that agree."""

    def altered(path: Path) -> None:
        arrays = dict(mx.load(str(path / file)))
        mx.eval(arrays)
        change(arrays)
        mx.save_safetensors(str(path / file), arrays)

    return of_checkpoint(altered)


def of_state(**fields: Any) -> Attack:
    """Fields of the newest checkpoint's state with values of a right type that no run has."""
    return of_checkpoint(lambda path: put(path / STATE, json.loads((path / STATE).read_text()) | fields))


def moment(arrays: dict[str, mx.array]) -> str:
    return next(name for name in sorted(arrays) if arrays[name].ndim == 2)


def of_padding(**layer: Any) -> Attack:
    """The newest checkpoint says that the ranks of its layers were padded, and how."""

    def change(path: Path) -> None:
        config = json.loads((path / "adapter_config.json").read_text())
        names = {name.rpartition(".")[0] for name in mx.load(str(path / "adapters.safetensors"))}
        layers = dict.fromkeys(names, config["lora_parameters"] | layer)
        put(path / "adapter_config.json", config | {"padded": True, "layers": layers})

    return of_checkpoint(change)


def of_note(run: Path, victim: Path) -> None:
    """A note of an agent that is none of this machine's, of a micro-batch below nothing."""
    note = {"micro_batch_size": -4, "gradient_checkpointing": False, "evidence": "\x1b[31mx", "boot": "x"}
    put(run / out_of_memory.NOTE.format(host=network.host_name()), note)


def of_manifest(hashes: Any) -> Attack:
    return of_checkpoint(lambda path: put(path / MANIFEST, hashes), is_agreed=False)


def of_cache(
    pattern: str, kind: str | Callable[[Path], None], told: str = "", may_run: bool = False, beside: str = ""
) -> Attack:
    """A data.cache_dir that came with a run's folder, with something in the place of what a pattern finds there.

    kind: as `in_place_of` has it, or what changes the file. may_run: training on it may also end well. Nobody's file is touched. beside: the name of a file beside what is found.
    """

    def attack(folder: Path) -> str | None:
        kept, cache, victim = folder / "kept", folder / "evil-cache", folder / "victim"
        words = training(folder, "data.streaming=true")
        shutil.rmtree(folder / "attacked", ignore_errors=True)
        for data in folder.glob("*.jsonl"):  # written anew, and the same: its index is good, and says when it was read
            os.utime(data, ns=(10**18, 10**18))
        if not kept.exists() and (status := run_of("train.py", [*words, f"data.cache_dir={kept}"]))[0] != 0:
            return f"nothing was kept: {status}"
        for old in (cache, victim, folder / "attacked"):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(kept, cache)
        victim.mkdir()
        (victim / "file").write_text(VICTIM)
        (found,) = cache.glob(pattern)
        if callable(kind):
            kind(found)
        else:
            in_place_of(str(found.with_name(beside or found.name).relative_to(cache)), kind)(cache, victim / "file")
        words.append(f"data.cache_dir={cache}")
        if not may_run or run_of("train.py", words)[0] != 0:
            shutil.rmtree(folder / "attacked", ignore_errors=True)
            if (fault := refused("train.py", words, told)) is not None:
                return fault
        is_touched = (victim / "file").read_text() != VICTIM or len(list(victim.iterdir())) > 1
        return f"it wrote outside of the cache: {[path.name for path in victim.iterdir()]}" if is_touched else None

    return attack


def of_index(**fields: Any) -> Attack:
    """An index of somebody else, with values that no index has: it is made anew."""
    return of_cache("index-*/index.json", lambda path: put(path, json.loads(path.read_text()) | fields), may_run=True)


def of_entries(**fields: int) -> Attack:
    """Places of records that are not in the file."""

    def change(path: Path) -> None:
        entries = np.fromfile(path, ENTRY)
        for name, value in fields.items():
            entries[name] = value
        entries.tofile(path)
        (tokens,) = (kept for kept in path.parent.parent.glob("tokens-*") if kept.is_dir())
        shutil.rmtree(tokens)  # or no record is read

    return of_cache("index-*/entries.bin", change, told="is no longer what was indexed")


def of_export(facts: Content) -> Attack:
    """An export's folder of somebody else, sent to the hub."""

    def attack(folder: Path) -> str | None:
        kept = folder / "evil-export"
        shutil.rmtree(kept, ignore_errors=True)
        put(kept / "tandem_export.json", facts)
        return refused("lib.export", [str(kept), "--push", "a/b", "--dry-run"])

    return attack


def of_written_export(facts: Content) -> Attack:
    """The same in a run's folder, where an export that was written before stays."""

    def attack(folder: Path) -> str | None:
        with copy_of_run(folder) as run:
            put(run / "export/mlx/tandem_export.json", facts)
            return refused("lib.export", [str(run), "--to", "mlx", "--push", "a/b", "--dry-run"])

    return attack


def of_calibration(content: Content) -> Attack:
    """A file of somebody else as this host's calibration, in the folder that a run's configuration names."""

    def attack(folder: Path) -> str | None:
        kept = folder / "evil-calibration"
        shutil.rmtree(kept, ignore_errors=True)
        put(kept / f"{network.host_name()}.json", content)
        return of_folder(lambda run, victim: set_in(run / "config.yaml", "plan.calibration_dir", str(kept)))(folder)

    return attack


def of_setting(key: str, value: str, program: str = "train.py", *words: str) -> Attack:
    """A run's config.yaml with another value; {victim} is a folder that is none of the run's."""

    def change(run: Path, victim: Path) -> None:
        for place in (run, *(run / "checkpoints").glob("step-*")):
            set_in(place / "config.yaml", key, value.replace("{victim}", str(victim.parent)))
            if (place / MANIFEST).exists():
                agree(place)

    return of_folder(change, program, *words)


def of_records(*records: Any) -> Attack:
    """Lines of a run's log, as the pages show them: no markup of theirs, and no traceback."""

    def attack(folder: Path) -> str | None:
        with copy_of_run(folder) as run:
            log = run / "logs" / "rank-000.jsonl"
            with log.open("ab") as file:
                for record in records:
                    file.write((record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n")
            return _page(run)

    return attack


def _page(run: Path) -> str | None:
    """Why the pages of a run do not hold."""
    from dash import html  # takes a second, and many read this file

    status, _, errors = run_of("lib.dashboard", ["--export", str(run)])
    if status not in (0, 2) or "Traceback" in errors:
        return f"status {status}: {errors[-300:]}"
    history = RunHistory(run)
    while history.read():
        pass
    rounds.section(html, history)
    for page in (*run.rglob("*.html"), *run.rglob("*.svg"), run / "README.md"):
        lines = page.read_text().splitlines() if page.exists() else []
        if any(MARKUP in line for line in lines if page.suffix != ".md" or not line.startswith("    ")):  # of code
            return f"{page.name} has its markup"
    return None


def record(**fields: Any) -> dict[str, Any]:
    return {"kind": "step", "time": 2e9, "rank": 0, "host": "a", "step": 1, "loss": 0.5} | fields


def round_record(**fields: Any) -> dict[str, Any]:
    figures = dict.fromkeys(("accepted", "duplicates", "tokens", "entropy", "score"), 0.5)
    return record(kind="round", round=1, undone=False, held_out={"exact_match": 0.5}, answers=figures) | fields


def of_run_name(name: str) -> Attack:
    """A word run.name that would lead out of run.dir, or is no name."""
    return of_words(f"run.name={name}")


def of_hosts(content: Content) -> Attack:
    """A host file: names that ssh or a shell could take for more than names are refused."""

    def attack(folder: Path) -> str | None:
        put(folder / "evil-hosts", content)
        return refusal_of(lambda: hostfile.read(folder / "evil-hosts"))

    return attack


def of_keys(content: Content) -> Attack:
    def attack(folder: Path) -> str | None:
        put(folder / "evil-keys", content)
        return refusal_of(lambda: api_keys.read(folder / "evil-keys"))

    return attack


def refusal_of(read: Callable[[], object]) -> str | None:
    """Why a reader did not refuse by one clear line."""
    try:
        taken = read()
    except UserError as error:
        return None if str(error) == shown(str(error)) and "\n" not in str(error) else f"it shows {str(error)!r}"
    return f"it takes {str(taken)[:200]}"


def of_environment(**variables: str) -> Attack:
    """Variables of the environment: training goes on, or one line says what is wrong."""

    def attack(folder: Path) -> str | None:
        before = dict(os.environ)
        try:
            os.environ.update(variables)
            words = [f"run.dir={folder / 'attacked'}", "run.name=attacked", "train.steps=1", "evaluate.samples=0"]
            shutil.rmtree(folder / "attacked", ignore_errors=True)
            words += [*tiny.settings(folder), *words, "--config", str(tiny.config_file(folder))]
            status, _, errors = run_of("train.py", words)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return None if status in (0, 2) and "Traceback" not in errors else f"status {status}: {errors[-300:]}"

    return attack


def pushes(name: str, change: Callable[[Path], None]) -> Attack:
    """A file in an export that must not be sent."""

    def attack(folder: Path) -> str | None:
        export = folder / "evil-export"
        shutil.rmtree(export, ignore_errors=True)
        put(export / "adapter_config.json", {"a": 1})
        change(export / name)
        return refusal_of(lambda: push_checks.files_to_send(export))

    return attack


def link_out(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def unfinished_links(run: Path, victim: Path) -> None:
    """Links to a file of yours, under the names that files of a run have until they are whole, for every process."""
    for name in (*WRITTEN, "report.html", "curves.png", "curves.svg", "tandem.svg"):
        (run / f"{name}.{os.getpid()}.unfinished").symlink_to(victim)


def nests_folders(folder: Path) -> str | None:
    """A thousand, one in the other: Python's own search for files ends in a RecursionError there."""
    with copy_of_run(folder) as run:
        nested = run / "logs"
        for _ in range(1000):
            (nested := nested / "d").mkdir()
        try:
            return refused("train.py", ["--resume", str(run), RESUMED], told="nested too deep")
        finally:
            for path in (nested, *nested.parents[:999]):
                path.rmdir()


def part_is_a_pipe(run: Path, victim: Path) -> None:
    """Every rank has a part of its own there, or so the state says."""
    state = newest(run) / STATE
    put(state, json.loads(state.read_text()) | {"parts": ["x"]})
    agree(newest(run))
    put(run / "checkpoints/ranks" / f"{newest(run).name}-rank-000.safetensors", pipe)


def reference_is_a_pipe(run: Path, victim: Path) -> None:
    """In a run whose reference moves with it."""
    for place in (run, newest(run)):
        set_in(place / "config.yaml", "train.reference_sync_steps", "2")
    agree(newest(run))
    put(newest(run) / REFERENCE, pipe)


def into_a_rank(folder: Path) -> str | None:
    with copy_of_run(folder) as run:
        (run / "ranks").mkdir()
        (run / "ranks/rank-000").symlink_to(folder)
        return refusal_of(lambda: own_folder(run, 0))


WRITTEN = ("config.yaml", "plan.json", "summary.json", "README.md", "adapters.safetensors", "adapter_config.json")
ATTACKS: dict[str, Attack] = {
    # Links in a run's folder
    **{f"run: {name} is a link": of_folder(in_place_of(name, "link")) for name in (*WRITTEN, ".lock")},
    **{f"run: {name} is a hard link": of_folder(in_place_of(name, "hard link")) for name in (*WRITTEN, ".lock")},
    "run: its log is a link": of_folder(in_place_of("logs/rank-000.jsonl", "link")),
    "run: its log is a hard link": of_folder(in_place_of("logs/rank-000.jsonl", "hard link")),
    "run: its log is a pipe": of_folder(in_place_of("logs/rank-000.jsonl", "pipe")),
    "run: its log never ends": of_folder(in_place_of("logs/rank-000.jsonl", "zero")),
    "run: its lock is a pipe": of_folder(in_place_of(".lock", "pipe")),
    "run: its plan is a pipe": of_folder(in_place_of("plan.json", "pipe")),
    "run: its configuration is a pipe": of_folder(in_place_of("config.yaml", "pipe")),
    "run: folders 1,000 deep": nests_folders,
    "run: the folder of ranks' adapters is a link": of_folder(in_place_of("ranks", "folder")),
    "run: the folder of a rank's adapter is a link": into_a_rank,
    "run: an unfinished checkpoint is a link": of_folder(in_place_of("checkpoints/.unfinished-00000003", "folder")),
    "run: a checkpoint is a link": of_folder(in_place_of("checkpoints/step-00000009", "folder")),
    "run: its checkpoints are a link": of_folder(in_place_of("checkpoints", "folder")),
    "run: its unfinished files are links": of_folder(unfinished_links),
    **{
        f"run: {name} is of 12 GB": of_folder(in_place_of(name, "huge"))
        for name in (*WRITTEN, ".lock", "logs/rank-000.jsonl", "checkpoints/step-00000002/manifest.json")
    },
    **{
        f"pages: {name} is of 12 GB": of_folder(in_place_of(name, "huge"), "lib.dashboard", "--export", "{run}")
        for name in ("config.yaml", "plan.json", "summary.json", "logs/rank-000.jsonl")
    },
    **{
        f"run: a log's name is {name}": of_folder(lambda run, victim, name=name: put(run / "logs" / name, "{}\n"))
        for name in ("rank-x.jsonl", "rank-.jsonl", "rank-٣.jsonl", f"rank-{'9' * 200}.jsonl")
    },
    "run: a log's resumes are text": of_folder(
        lambda run, victim: put(run / "logs/rank-000.jsonl", record(kind="start", resumes="x", resume_ids=3))
    ),
    "run: its rounds are a link": of_folder(in_place_of("rounds", "folder")),
    **{
        f"run: a round's {name} is {kind}": of_folder(in_place_of(f"rounds/0001/{name}", kind))
        for name in ("samples.jsonl", "samples.jsonl.partial", "scores.jsonl", "round.json")
        for kind in ("link", "hard link", "pipe", "zero")
    },
    "pages: their unfinished files are links": of_folder(unfinished_links, "lib.dashboard", "--export", "{run}"),
    "pages: the log is a pipe": of_folder(
        in_place_of("logs/rank-000.jsonl", "pipe"), "lib.dashboard", "--export", "{run}"
    ),
    "pages: the summary is a pipe": of_folder(
        in_place_of("summary.json", "pipe"), "lib.dashboard", "--export", "{run}"
    ),
    **{
        f"pages: {name} is a {kind}": of_folder(in_place_of(name, kind), "lib.dashboard", "--export", "{run}")
        for name in ("curves.png", "report.html", "curves.svg")
        for kind in ("link", "pipe")
    },
    "pages: the README is a link": of_folder(in_place_of("README.md", "link"), "lib.dashboard", "--export", "{run}"),
    # Names of runs
    "name: ..": of_run_name(".."),
    "name: .": of_run_name("."),
    "name: a folder above": of_run_name("../outside"),
    "name: two folders": of_run_name("a/b"),
    "name: a full path": of_run_name("/tmp/outside"),
    "name: a line break": of_run_name("a\nb"),
    "name: what a terminal obeys": of_run_name("\x1b[31ma"),
    "name: 300 letters": of_run_name("a" * 300),
    "name: written backwards": of_run_name("a\u202eb"),
    "name: a list": of_run_name("[1, 2]"),
    "folder: a file": of_words("run.dir={d}/train.jsonl"),
    "folder: a device": of_words("run.dir=/dev/null"),
    # Checkpoints
    "checkpoint: a manifest that is a list": of_manifest([1]),
    "checkpoint: a manifest of numbers": of_manifest({STATE: 3}),
    "checkpoint: a manifest of 100,000 lists": of_manifest("[" * 100_000 + "]" * 100_000),
    "checkpoint: a file outside": of_manifest({"../../config.yaml": "x"}),
    "checkpoint: the passwords": of_manifest({"/etc/passwd": "x"}),
    "checkpoint: a manifest that is a pipe": of_checkpoint(lambda path: put(path / MANIFEST, pipe), is_agreed=False),
    "checkpoint: a manifest that never ends": of_checkpoint(
        lambda path: put(path / MANIFEST, link_to("/dev/zero")), is_agreed=False
    ),
    "checkpoint: weights that are a pipe": of_checkpoint(
        lambda path: put(path / "adapters.safetensors", pipe), is_agreed=False
    ),
    "checkpoint: weights that never end": of_checkpoint(
        lambda path: put(path / "adapters.safetensors", link_to("/dev/zero")), is_agreed=False
    ),
    "checkpoint: weights that are none": of_checkpoint(lambda path: put(path / "adapters.safetensors", b"")),
    "checkpoint: an optimizer that is none": of_checkpoint(lambda path: put(path / "optimizer.safetensors", b"x" * 99)),
    "checkpoint: an optimizer of 2^63 bytes": of_checkpoint(
        lambda path: put(path / "optimizer.safetensors", b"\xff" * 7 + b"\x7f{}")
    ),
    "checkpoint: a moment of another shape": of_arrays(
        "optimizer.safetensors", lambda arrays: arrays.update({moment(arrays): arrays[moment(arrays)].T})
    ),
    "checkpoint: a moment is missing": of_arrays("optimizer.safetensors", lambda arrays: arrays.pop(moment(arrays))),
    "checkpoint: an optimizer without its step": of_arrays("optimizer.safetensors", lambda arrays: arrays.pop("step")),
    "checkpoint: an optimizer of 3 * 10^8 layers": of_arrays(
        "optimizer.safetensors", lambda arrays: arrays.update({"300000000.x": mx.ones(2)})
    ),
    "checkpoint: a row of 2^62": of_state(cursor=2**62),
    "checkpoint: resumes from no step": of_state(resumes=[[]], resume_ids=["a"]),
    "checkpoint: more ids than resumes": of_state(resumes=[], resume_ids=["a"]),
    "checkpoint: micro-batches of no pairs": of_state(
        rounds={"shares": [1], "speeds": [1.0], "max_micro_batch_sizes": [0]}
    ),
    "checkpoint: speeds of no ranks": of_state(rounds={"shares": [1], "speeds": []}),
    **{
        f"checkpoint: layers of {field} {value}": of_padding(**{field: value})
        for field, value in (
            ("rank", 20),
            ("rank", 100_000),
            ("rank", -5),
            ("rank", 2**31 - 8),
            ("rank", 2**40),
            ("scale", 0.0),
        )
    },
    "run: a note of too little memory": of_folder(of_note),
    "checkpoint: a copy of a rank's part": of_folder(
        lambda run, victim: put(run / "checkpoints/ranks/step-00000001-rank-000 (1).safetensors", b"")
    ),
    "checkpoint: a rank's part is a pipe": of_folder(part_is_a_pipe),
    "checkpoint: a reference that is a pipe, and in no manifest": of_folder(reference_is_a_pipe),
    "checkpoint: a rank's part of another name": of_folder(
        lambda run, victim: put(run / "checkpoints/ranks/step-x-rank-y.safetensors", b"")
    ),
    "checkpoint: an adapter's configuration of lists": of_checkpoint(
        lambda path: put(path / "adapter_config.json", {"padded": True, "layers": [], "lora_parameters": 3})
    ),
    "checkpoint: a step of 30 digits": of_folder(
        lambda run, victim: (run / "checkpoints" / f"step-{'9' * 30}").mkdir()
    ),
    "checkpoint: a step of 5,000 digits in other letters": of_folder(
        lambda run, victim: (run / "checkpoints" / "step-٣").mkdir()
    ),
    "checkpoint: a file in a checkpoint's place": of_folder(
        lambda run, victim: put(run / "checkpoints/step-00000009", "x")
    ),
    "checkpoint: --checkpoint ../..": of_folder(
        lambda run, victim: None, "lib.evaluate", "--run", "{run}", "--checkpoint", "../.."
    ),
    "checkpoint: --checkpoint of 5,000 digits": of_folder(
        lambda run, victim: None, "lib.evaluate", "--run", "{run}", "--checkpoint", "9" * 5000
    ),
    # Settings of a run's folder
    "setting: run.dir of another": of_setting("run.dir", "{victim}"),
    "setting: run.name of another": of_setting("run.name", "../../../victim"),
    "setting: calibrations of another": of_setting("plan.calibration_dir", "{victim}"),
    "setting: a cache of another": of_setting("data.cache_dir", "{victim}"),
    "setting: a sink without its package": of_setting("run.sinks", "[wandb]"),
    "setting: figures that are sent away": of_setting("run.sinks", "[trackio]"),
    "setting: two figures' pages": of_setting("run.pages", "3"),
    "setting: a key twice": of_folder(
        lambda run, victim: put(run / "config.yaml", (run / "config.yaml").read_text() + "run: {}\n")
    ),
    "calibration: a pipe": of_calibration(pipe),
    "calibration: it never ends": of_calibration(link_to("/dev/zero")),
    "calibration: 12 GB": of_calibration(huge),
    # A cache in a run's folder
    **{
        f"cache: {name} is a {kind}": of_cache(name, kind, told="would be written to")
        for name in ("tokens-*/table.bin", "tokens-*/segment-00001.bin", "tokens-*/.lock", "index-*.lock")
        for kind in ("link", "hard link", "pipe")
    },
    **{
        f"cache: {name} is a link": of_cache(name, "folder", told="would be written to")
        for name in ("tokens-*", "index-*[0-9a-f]")
    },
    "cache: an index of lists": of_cache("index-*/index.json", lambda path: put(path, [1]), may_run=True),
    "cache: an index of nothing": of_cache("index-*/index.json", lambda path: put(path, {}), may_run=True),
    "cache: an index of 100,000 lists": of_cache("index-*/index.json", lambda path: put(path, DEEP), may_run=True),
    "cache: an index that is a pipe": of_cache("index-*/index.json", "pipe", may_run=True),
    "cache: an index of 12 GB": of_cache("index-*/index.json", "huge", may_run=True),
    "cache: an index that never ends": of_cache("index-*/index.json", "endless", may_run=True),
    "cache: entries that are a pipe": of_cache("index-*/entries.bin", "pipe", may_run=True),
    "cache: forms of lists": of_index(formats=[1]),
    "cache: a form without its first row": of_index(formats={"x": {"count": 1}}),
    "cache: rows below none": of_index(count=-1),
    "cache: rows of text": of_index(count="many"),
    "cache: sizes of lists": of_index(size=[], modified_ns={}),
    "cache: unusable rows that have no names": of_index(unusable_count=3),
    "cache: unusable rows of numbers": of_index(unusable=[1], unusable_count=1),
    "cache: rows that were unpacked to a pipe": of_index(unpacked=True, bytes=0),
    "cache: rows before the file": of_entries(offset=-1),
    "cache: rows behind the file": of_entries(offset=2**62),
    "cache: rows of 4 GB": of_entries(size=2**32 - 1),
    "export: facts of lists": of_export([1]),
    "export: facts that are a pipe": of_export(pipe),
    "export: facts that were written before are text": of_written_export("{"),
    "export: facts that were written before are lists": of_written_export([1]),
    "export: facts that were written before never end": of_written_export(link_to("/dev/zero")),
    "cache: an unfinished index is a link": of_cache("index-*/index.json", "link", may_run=True, beside=".index.json"),
    # Records, as pages show them
    "record: markup as a host": of_records(record(host=MARKUP)),
    "record: markup as a kind": of_records(record(kind=MARKUP)),
    "record: markup as a warning": of_records(record(kind="warning", text=MARKUP)),
    "record: markup as a sample": of_records(
        record(kind="samples", samples=[{"prompt": MARKUP, "before": MARKUP, "after": MARKUP}])
    ),
    "record: markup as a setting": of_records(record(kind="start", config={"model": {"path": MARKUP}, MARKUP: MARKUP})),
    "record: markup as a plan": of_records(record(kind="plan", plan={"strategy": MARKUP, "hosts": [MARKUP]})),
    "record: markup as a round's pairs": of_records(round_record(examples=[dict.fromkeys(PAIR, MARKUP)])),
    "record: a round without figures": of_records(record(kind="round", round=1)),
    "record: a round without answers": of_records(round_record(answers={})),
    "record: a round of text": of_records(round_record(round="x", answers="x", held_out=[1])),
    "record: samples that are none": of_records(record(kind="samples", samples=[3, None, {"prompt": [1]}])),
    "record: a step of 10^300": of_records(record(step=1e300), record(step=10**300)),
    "record: a step below zero": of_records(record(step=-5)),
    "record: a step of text": of_records(record(step="x")),
    "record: a time of 10^300": of_records(record(time=1e300)),
    "record: a time of text": of_records(record(time="x")),
    "record: a rank of 10^18": of_records(record(rank=10**18)),
    "record: a rank of text": of_records(record(rank="x")),
    "record: a loss of text": of_records(record(loss="x")),
    "record: figures without end": of_records(b'{"kind": "step", "step": 1, "loss": Infinity, "time": NaN}'),
    "record: 100,000 lists deep": of_records(b"[" * 100_000 + b"]" * 100_000),
    "record: 50 MB in one line": of_records(b'{"kind": "' + b"x" * 50_000_000 + b'"}'),
    "record: no text": of_records(bytes(range(256)).replace(b"\n", b"")),
    "record: a list": of_records([1, 2], 3, None, "x"),
    "record: half a surrogate pair": of_records(record(host="\ud800", kind="\udfff")),
    # Host files
    **{
        f"host: {name!r}": of_hosts(f"{name} slots=1\n")
        for name in (
            "-oProxyCommand=touch\tx",
            "-F/etc/passwd",
            "a;touch x",
            "a&&b",
            "$(touch",
            "`touch`",
            "a|b",
            "user@-oProxyCommand=x",
            "a@b@c",
            "a'b",
            'a"b',
            "a\\b",
            "../a",
            "a/b",
            "ä.example",
            "а.example",
            "a\u200bb",
            "%h",
            "ssh://a",
            "a" * 300,
        )
    },
    "host: slots of 20 digits behind zeros": of_hosts("a slots=00000000199999999999\n"),
    "host: slots below zero": of_hosts("a slots=-1\n"),
    "host: slots of other digits": of_hosts("a slots=٣\n"),
    "host: a command as an option": of_hosts("a slots=1 ssh=evil\n"),
    "host: a pipe": of_hosts(pipe),
    "host: /dev/zero": of_hosts(link_to("/dev/zero")),
    "host: a million lines": of_hosts("a slots=1\n" * 1_000_000),
    "host: a million hosts": of_hosts("h" + "\nh".join(map(str, range(1_000_000)))),
    "host: JSON of 100,000 lists": of_hosts("[" * 100_000 + "]" * 100_000),
    "host: JSON with a command": of_hosts([{"ssh": "-oProxyCommand=touch x", "ips": ["10.0.0.1"]}]),
    "host: JSON with a device": of_hosts([{"ssh": "a", "ips": ["10.0.0.1"], "rdma": ["x; touch y"]}]),
    "host: JSON with an address": of_hosts([{"ssh": "a", "ips": ["10.0.0.1; touch x"]}]),
    "host: JSON with a variable": of_hosts({"hosts": [{"ssh": "a"}], "envs": ["A B=1"]}),
    "host: JSON with a line break": of_hosts({"hosts": [{"ssh": "a"}], "envs": ["A=1\nLD_PRELOAD=x"]}),
    "host: JSON of another backend": of_hosts({"hosts": [{"ssh": "a"}], "backend": "../evil"}),
    "host: not UTF-8": of_hosts(b"\xff\xfe\xfd"),
    # Keys
    "keys: a pipe": of_keys(pipe),
    "keys: /dev/zero": of_keys(link_to("/dev/zero")),
    "keys: a key itself": of_keys("sk-secret\n"),
    "keys: a name that a terminal obeys": of_keys("\x1b[31m sha256:" + "a" * 64),
    "keys: a file that anybody may change": of_keys(
        lambda path: (path.write_text("alice sha256:" + "a" * 64 + "\n"), path.chmod(0o646))[0]
    ),
    "keys: a short hash": of_keys("alice sha256:abc\n"),
    "keys: other digits": of_keys("alice sha256:" + "٣" * 64),
    "keys: a name twice": of_keys(("alice sha256:" + "a" * 64 + "\n") * 2),
    "keys: 100 MB": of_keys(b"#" * 100_000_000),
    # The environment
    "environment: a rank of text": of_environment(MLX_RANK="x"),
    "environment: a rank below zero": of_environment(MLX_RANK="-1", MLX_WORLD_SIZE="2"),
    "environment: a rank beyond": of_environment(OMPI_COMM_WORLD_RANK="9", OMPI_COMM_WORLD_SIZE="2"),
    "environment: a world of text": of_environment(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="x"),
    "environment: hosts that never end": of_environment(MLX_RANK="0", MLX_HOSTFILE="/dev/zero"),
    "environment: hosts that are none": of_environment(MLX_RANK="0", MLX_HOSTFILE="/nowhere"),
    "environment: columns below zero": of_environment(COLUMNS="-5", LINES="x"),
    "environment: a million columns": of_environment(COLUMNS="1000000"),
    # What is sent away
    "push: a link out of the export": pushes("notes.txt", link_out),
    "push: a private key": pushes("notes.txt", lambda path: put(path, "-----BEGIN OPENSSH PRIVATE KEY-----\nx\n")),
    "push: a token": pushes("x.json", lambda path: put(path, {"token": "hf_" + "a" * 34})),
    "push: an .env": pushes(".env", lambda path: put(path, "A=1")),
    "push: the data": pushes("train.jsonl", lambda path: put(path, "{}")),
    "push: a name outside": lambda folder: refused(
        "lib.export", [str(folder / "runs/done"), "--to", "mlx", "--push", "../evil"]
    ),
    "push: a name that is an option": lambda folder: refused(
        "lib.export", [str(folder / "runs/done"), "--to", "mlx", "--push", "-x/y"]
    ),
}
