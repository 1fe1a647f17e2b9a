"""Do the tests notice when the code is wrong? Changes the pure modules, one place at a time, and runs their tests.

    python benchmarks/mutation.py                               40 places of every pure module, about half an hour
    python benchmarks/mutation.py --modules training.losses,plan.shares --places 1000
    python benchmarks/mutation.py --quick                       10 places of losses and hostfile

A mutant that no test notices survives: either a test is missing, or the change means nothing (an equal bound, a value
that is not used). Comparisons, arithmetic, constants, conditions, `and`/`or`, signs and returned values are changed; texts of
messages, types and assertions are not. Each mutant is tried in a forked process that finds its source in the place of the
module's, so that what all have in common (numpy, MLX, hypothesis, pytest) is imported once: Linux. Small on purpose: mutmut
brings six other packages (a terminal interface among them), cosmic-ray more.

November 2026, seed 0, on two busy cores:

    module       noticed    what survived
    losses       20 of 20   of 70 by an earlier run four: a branch that is not taken, a sum with zero
    watch        37 of 40   two have a test since; nobody dies of status 0
    division     38 of 40   both have a test since
    jobfile      15 of 18   two have a test since; JSON's indentation
    compression  24 of 25   the scale of a block of zeros, whatever it is
    hostfile     18 of 20   ssh's time limit; how much of a long line a message shows
    schedule     14 of 20   three are only met by ranks, under mpirun; a bound, an unused default; the fixed part of a
                            step's time, which no test weighs against a new plan
    merge        19 of 25   three were `strict=` of zip, left out since; two change nothing; one has a test since

order, shapes, plan, ledger and advice were not run to their end yet.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib.system import mpi_and_blas

LIMIT_SECONDS = 90  # of one module's tests
TESTS = {  # of every pure module, the tests that are about it
    "distributed.compression": "tests/test_compression.py",
    "model.partition": "tests/test_division.py tests/test_plan.py -k 'divi or dealt or smallest or larger'",
    "launch.hostfile": "tests/test_hostfile.py",
    "launch.rank_commands": "tests/test_slurm.py",
    "training.local_sgd": "tests/test_local_sgd.py",
    "training.losses": "tests/test_losses.py",
    "training.unpaired_losses": "tests/test_unpaired.py",
    "data.order": "tests/test_data_order.py",
    "data.batch_shapes": "tests/test_shapes.py -k 'any_rows or depend or cut or by_hand or ladder'",
    "plan.plan": "tests/test_plan.py tests/test_replan.py",
    "plan.replan": "tests/test_replan.py",
    "plan.shares": "tests/test_plan.py tests/test_replan.py",
}
SWAPS: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
SWAPS |= {ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
SWAPS |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
SWAPS |= {ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And}


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one thing wrong, in every way that we know."""
    wrong = copy.deepcopy(node)
    if isinstance(wrong, ast.Compare) and type(wrong.ops[0]) in SWAPS:
        wrong.ops[0] = SWAPS[type(wrong.ops[0])]()
        yield wrong
    elif isinstance(wrong, ast.BinOp | ast.BoolOp) and type(wrong.op) in SWAPS:
        wrong.op = SWAPS[type(wrong.op)]()
        yield wrong
    elif isinstance(wrong, ast.UnaryOp) and isinstance(wrong.op, ast.USub | ast.Not):
        yield wrong.operand
    elif isinstance(wrong, ast.Constant) and isinstance(wrong.value, bool):
        yield ast.Constant(not wrong.value)
    elif isinstance(wrong, ast.Constant) and isinstance(wrong.value, int | float):
        yield ast.Constant(wrong.value + 1)
    elif isinstance(wrong, ast.If | ast.IfExp | ast.While):
        wrong.test = ast.Constant(isinstance(node, ast.If | ast.IfExp))
        yield wrong
    elif isinstance(wrong, ast.Return) and not (
        wrong.value is None or isinstance(wrong.value, ast.Constant) and wrong.value.value is None
    ):
        wrong.value = ast.Constant(None)
        yield wrong


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose children are changed: not those of a message, a type, or a check of our own."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.arg) or (
        isinstance(node, ast.keyword) and node.arg == "strict"
    ):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield from parents(child)


class Mutant(NamedTuple):
    """A change to a module's tree: `wrong` in the place of a parent's child."""

    parent: ast.AST
    field: str
    place: int | None  # where the field is a list
    child: ast.AST
    wrong: ast.AST

    def __str__(self) -> str:
        told = " ➜ ".join(ast.unparse(node).splitlines()[0] for node in (self.child, self.wrong))
        return f"line {getattr(self.child, 'lineno', '?')}: {told}"

    def source_of(self, tree: ast.Module) -> str:
        """The module's source with the change."""
        before = getattr(self.parent, self.field)
        after: Any = self.wrong
        if self.place is not None:
            after = [*before[: self.place], self.wrong, *before[self.place + 1 :]]
        setattr(self.parent, self.field, after)
        try:
            return ast.unparse(ast.fix_missing_locations(tree))
        finally:
            setattr(self.parent, self.field, before)


def mutants(tree: ast.Module) -> Iterator[Mutant]:
    """Every mutant of a module."""
    for parent in parents(tree):
        for field, value in ast.iter_fields(parent):
            for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    yield from (Mutant(parent, field, place, child, wrong) for wrong in changed(child))


def file_of(module: str) -> Path:
    """The file of a module of lib/."""
    return ROOT / "lib" / f"{module.replace('.', '/')}.py"


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a module another source."""

    def __init__(self, module: str, source: str):
        self.name, self.path, self.source = f"lib.{module}", str(file_of(module)), source

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, origin=self.path) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)


def start(module: str, source: str) -> int:
    """Runs the module's tests with this source in its place, in a process of its own; its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    import pytest

    sys.meta_path.insert(0, Instead(module, source))
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    os._exit(pytest.main([*options, *shlex.split(TESTS[module])]))


def survivors(module: str, sources: Sequence[str], jobs: int) -> list[bool]:
    """Whether the module's tests pass with each of these sources; what takes too long was noticed."""
    found = [False] * len(sources)
    left, running = list(enumerate(sources)), dict[int, tuple[int, float]]()
    while left or running:
        while left and len(running) < jobs:
            number, source = left.pop(0)
            running[start(module, source)] = (number, time.monotonic() + LIMIT_SECONDS)
        for pid, (number, deadline) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0)
            if ended:
                found[number] = status == 0
                del running[pid]
        time.sleep(0.01)
    return found


def import_what_all_need() -> None:
    """Everything but the project's own modules, one of which is another in each process."""
    mpi_and_blas.prepare()
    import hypothesis  # noqa: F401
    import mlx.nn  # noqa: F401
    import mlx.optimizers  # noqa: F401
    import mlx_lm.utils  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401

    for name in [name for name in sys.modules if name == "lib" or name.startswith("lib.")]:
        del sys.modules[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default=",".join(TESTS), help="of lib/, comma-separated")
    parser.add_argument("--places", type=int, default=40, metavar="N", help="of each module, drawn by the seed")
    parser.add_argument("--quick", action="store_true", help="10 places of losses and hostfile")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    modules = ["training.losses", "launch.hostfile"] if options.quick else options.modules.split(",")
    os.chdir(ROOT)
    import_what_all_need()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = temporary
        for module in modules:
            tree = ast.parse(file_of(module).read_text())
            if not survivors(module, [ast.unparse(tree)], 1)[0]:
                sys.exit(
                    f"error: the tests of {file_of(module).relative_to(ROOT)} fail, or take over {LIMIT_SECONDS} s, as it is"
                )
            every = list(mutants(tree))
            most = min(10 if options.quick else options.places, len(every))
            drawn = [every[place] for place in sorted(random.Random(options.seed).sample(range(len(every)), most))]
            lived = survivors(module, [mutant.source_of(tree) for mutant in drawn], options.jobs)
            kept = [str(mutant) for mutant, alive in zip(drawn, lived, strict=True) if alive]
            print(
                f"{file_of(module).relative_to(ROOT)}: {most - len(kept)} of {most} mutants noticed ({len(every)} in all)"
            )
            for told in kept:
                print(f"    survives  {told}")
            sys.stdout.flush()
            results[module] = {"mutants": most, "survivors": kept}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
