"""The house's own rules: imports go one way through the rooms, --help answers at once, and nothing names a machine."""

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.tiny import ROOT

# The rooms of lib/, in the order in which one may import another: to the left only. Those of one tuple never meet.
ROOMS = [
    ("environment", "late_imports"),  # which every Python reads first, to go on in .venv and to start quickly
    ("errors",),
    ("config",),
    ("system",),
    ("telemetry", "data", "model"),
    ("distributed",),
    ("plan",),
    ("training",),
    ("evaluate",),
    ("rollouts",),
    ("dashboard", "launch", "export"),
    ("serve",),
]
DOORS = {"agent": "launch", "doctor": "launch", "server": "serve"}  # `python -m lib.X`, in front of a room
WITHOUT_MLX = ("errors", "config", "system", "telemetry", "launch", "dashboard", "serve", "agent", "doctor", "server")
ASK_MLX = ("system.device_clock", "system.matmul_rate", "system.provenance")  # what it computes on, how fast, and when
ASK_MLX += (
    "serve.backend_server",
    "serve.memory_room",
    "serve.prompt_cache",
    "serve.prompt_pace",
    "serve.samplers",
)  # what a process of its own serves a model with
MODULES = {
    ".".join(path.relative_to(ROOT / "lib").with_suffix("").parts): path
    for path in sorted((ROOT / "lib").rglob("*.py"))
    if path.stem != "__init__"
}


def imports_of(name: str) -> Iterator[str]:
    """The modules of lib/ that another one imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lib":
            source = (node.module or "").partition(".")[2]
            for alias in node.names:
                inside = f"{source}.{alias.name}".strip(".")
                yield inside if inside in MODULES else source
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("lib.") for alias in node.names if alias.name.startswith("lib."))


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way_through_the_rooms(name: str) -> None:
    order = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}
    room = name.split(".")[0]
    for imported in imports_of(name):
        other = imported.split(".")[0]
        if room in DOORS:
            assert other == DOORS[room], f"lib/{name}.py is only a door to {DOORS[room]}, and imports lib.{imported}"
        elif other != room:
            assert other in order, f"lib.{imported} is in none of the rooms of this test"
            assert order[other] < order[room], (
                f"lib.{name} imports lib.{imported}: {room} comes before {other}, or beside it"
            )


def test_no_circle() -> None:
    imports = {name: set(imports_of(name)) & MODULES.keys() - {name} for name in MODULES}
    while free := [name for name, others in imports.items() if not others]:
        imports = {name: others - set(free) for name, others in imports.items() if name not in free}
    assert not imports, f"these import each other: {sorted(imports)}"


@pytest.mark.parametrize("room", WITHOUT_MLX)
def test_what_needs_no_model_loads_without_mlx(room: str) -> None:
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(f'lib.{name}')\n    assert 'mlx.core' not in sys.modules, name"
    names = [
        name for name in MODULES if name.split(".")[0] == room and not name.endswith("__main__") and name not in ASK_MLX
    ]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert names and done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_functions_fit_the_mind(name: str) -> None:
    """A module of 500 lines, a function of 80 lines and 8 parameters: beyond, it has more than one reason to change."""
    text = MODULES[name].read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert (node.end_lineno or 0) - node.lineno < 80, node.name
            assert len([one for one in given if one not in ("self", "cls")]) <= 8, node.name


def text_without_encoding(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that read or write text as the locale has it. ruff's PLW1514 knows only paths whose type it can infer."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        name, is_method = ast.unparse(node.func).rpartition(".")[2], isinstance(node.func, ast.Attribute)
        mode = [word.value for word in node.keywords if word.arg == "mode"]
        if name in ("open", "fdopen"):
            mode += node.args[0 if is_method and name == "open" else 1 :][:1]
            modes = [one.value for one in mode if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if ast.unparse(node.func) != "os.open" and all("b" not in one for one in modes) and len(modes) == len(mode):
                yield node
        elif (name, len(node.args)) in (("read_text", 0), ("write_text", 1)) or name == "NamedTemporaryFile":
            yield node


@pytest.mark.parametrize("name", MODULES)
def test_text_is_utf_8_in_every_locale(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    assert [f"line {node.lineno}: {ast.unparse(node)}" for node in text_without_encoding(tree)] == []


def test_text_without_an_encoding_is_found() -> None:
    wrong = "p.read_text(); p.write_text(x); open(p); open(p, 'a'); p.open(); p.open(mode='w'); os.fdopen(d, 'w')"
    right = "p.read_text('utf-8'); open(p, 'rb'); p.open('rb'); os.open(p, f); read_text(p, x, 3); Queue.open(p, 3)"
    assert [ast.unparse(node) for node in text_without_encoding(ast.parse(wrong))] == wrong.split("; ")
    assert not list(text_without_encoding(ast.parse(right)))


def test_help_needs_neither_mlx_nor_a_model() -> None:
    started = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "train.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    print(f"--help took {time.perf_counter() - started:.2f} s")
    assert result.returncode == 0 and "train.learning_rate=5e-05" in result.stdout
    assert not re.search(r"\b(mlx|transformers|numpy)\b", result.stderr), "--help imports what takes seconds"


def test_train_reads_as_a_story() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 175
