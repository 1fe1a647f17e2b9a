"""Where MLX keeps code that it compiled, and loads it from: a folder that is this user's alone.

MLX looks for libraries of CPU kernels in TMPDIR/mlx/VERSION/cpu, for CUDA's in ptx beside it, and asks nobody whose
they are. In a /tmp that all users share, whoever makes that folder first has his code run by all others.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path

FOLDER = "mlx"
VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # where C++ looks for the folder for temporary files


def keep_private() -> None:
    """Makes MLX's folder where there is none; where it is another user's, TMPDIR becomes a folder of one's own.

    Raises:
        SystemExit: status 2, after one line: it is another user's, and no other one can be made.
    """
    shared = Path(next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "/tmp"))
    own = shared / FOLDER
    with contextlib.suppress(OSError):  # it is there; or nothing can be kept there, by MLX either
        own.mkdir(mode=0o700)
    # MLX makes those below it, the cpu and ptx of each version, and where one was open, others may have.
    if not os.path.lexists(own) or all(_is_own(one, stat.S_IWGRP | stat.S_IWOTH) for one in (own, *_inside(own))):
        return
    try:
        os.environ["TMPDIR"] = str(_private(shared))
    except OSError as error:
        print(
            f"error: {own} is another user's, or others may write to it, and MLX would run what lies there; "
            f"no folder can be made in its place ({error}): set TMPDIR to one of your own",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    tempfile.tempdir = None  # Python looks at TMPDIR once


def _inside(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [*folder.glob("*"), *folder.glob("*/*")]
    return []


def _private(shared: Path) -> Path:
    """A folder that stays, for what is compiled to be found again; a new one where somebody has taken its name."""
    folder = shared / f"tandem-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return folder if _is_own(folder, 0o077) else Path(tempfile.mkdtemp(prefix="tandem-", dir=shared))


def _is_own(folder: Path, others: int) -> bool:
    """Whether it is a folder, of this user, for which others do not have any of these rights."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & others
