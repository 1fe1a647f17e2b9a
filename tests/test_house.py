"""The house's own rules: imports only go down, --help answers at once, and nothing names a machine."""

import ast
import re
import subprocess
import sys
import time

from tests.tiny import ROOT

FLOORS = [
    {
        "command",
        "config",
        "environment",
        "hints",
        "records",
        "calibration",
        "performance",
        "runtime",
        "hostfile",
        "machine",
        "division",
        "files",
        "os_commands",
    }
    | {
        "heartbeat",
        "channel",
        "watch",
        "network",
        "agent",
        "jobfile",
        "shapes",
        "hub",
        "keys",
        "completions",
        "backend",
        "sources",
        "spool",
        "tail",
        "history",
        "chunks",
        "sinks",
        "terminal",
        "shares",
        "rendezvous",
        "discovery",
        "validation",
        "estimate",
        "memory",
        "tape",
        "fitting",
        "correction",
        "strategy",
        "metal",
        "ring",
        "topology",
        "out_of_memory",
    },
    {"plan", "order", "model", "losses", "sync", "forward", "lora", "shard", "merge", "compression", "pool", "matmul"},
    {
        "data",
        "inspection",
        "streaming",
        "step",
        "batches",
        "advice",
        "choice",
        "schedule",
        "scoring",
        "loading",
        "checkpoint",
        "exchange",
        "ledger",
        "ceilings",
    }
    | {"rounds", "launcher", "preflight", "host_facts", "verdicts", "ranks", "reach", "supervisor"},
    {
        "evaluate",
        "bulk",
        "report",
        "dashboard",
        "pages",
        "charts",
        "server",
        "gateway",
        "listener",
        "spare",
        "ahead",
        "doctor",
        "learner",
    },
]


def imports_of(path: str) -> set[str]:
    """The modules of lib/ that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "lib":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lib."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lib.")}
    return found


def test_imports_only_go_down() -> None:
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    rooms = {path.stem for path in (ROOT / "lib").glob("*.py")} - {"__init__"}
    assert rooms <= floor_of.keys(), f"say on which floor these stand: {sorted(rooms - floor_of.keys())}"
    assert imports_of("lib/__init__.py") == {"environment"}
    for path in sorted((ROOT / "lib").glob("[!_]*.py")):
        for imported in imports_of(f"lib/{path.name}") - {path.stem}:
            below = floor_of[imported] < floor_of[path.stem]
            beside = (
                floor_of[imported] == floor_of[path.stem] and floor_of[path.stem] != 1
            )  # decisions and mechanisms stand alone
            assert below or beside, f"lib/{path.name} imports lib/{imported}.py"


def test_the_lowest_floor_loads_without_mlx() -> None:
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(f'lib.{name}')\n    assert 'mlx.core' not in sys.modules, name"
    names = sorted(name for name in FLOORS[0] if (ROOT / "lib" / f"{name}.py").exists())
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_needs_neither_mlx_nor_a_model() -> None:
    started = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "train.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    print(f"--help took {time.perf_counter() - started:.2f} s")
    assert result.returncode == 0 and "train.learning_rate=5e-05" in result.stdout
    assert not re.search(r"\b(mlx|transformers|numpy)\b", result.stderr), "--help imports what takes seconds"


def test_train_reads_as_a_story() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 320
