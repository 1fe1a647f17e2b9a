"""Files that may come from anybody: regular, of bounded size, UTF-8, or one clear line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from lib.errors import UserError

# Names in a folder of checkpoints; macOS adds some of its own, in a folder that was looked at or on another's disk.
OF_CHECKPOINTS = re.compile(r"step-\d+|\.unfinished-.*|ranks|\.DS_Store|\._.*")

WRITTEN = ("logs", "ranks", "rounds", "recent", "tensorboard")  # folders of a run that it writes in
MANIFEST = "manifest.json"  # of a checkpoint, which has a config.yaml as a run has
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # how such a file begins


def require_regular(path: Path, what: str, limit_bytes: int | None = None) -> None:
    """Makes sure that reading a file comes to an end: a pipe waits for a writer, and /dev/zero never ends.

    Raises:
        UserError: it is a pipe, a device or a socket, or a file of more than `limit_bytes`. One that is absent is for
            the reader to report.
    """
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return
    mode = facts.st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise UserError(f"{what} {path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file; copy it into one")
    if limit_bytes is not None and facts.st_size > limit_bytes:
        raise _too_large(path, what, limit_bytes)


def _too_large(path: Path, what: str, limit_bytes: int) -> UserError:
    return UserError(f"{what} {path} has more than {limit_bytes:,} bytes; is it the file that you mean?")


def require_own(folder: Path) -> None:
    """Makes sure that a run may read its folder and append to its files there: the folder may be somebody else's.

    Raises:
        UserError: there is a pipe or a device; the lock, a log or a file of a round is a link, perhaps to a file of
            yours, or has a second name; or a folder of checkpoints, where old ones are removed, is a link to one that
            may have another use.
    """
    for path in folder.iterdir():
        require_regular(path, "the run's")
    try:
        written = [path for name in WRITTEN for path in folder.glob(f"{name}/**/*")]
    except RecursionError:
        raise UserError(f"{folder} has folders that are nested too deep for a run's; put a copy in its place") from None
    folders = [folder / name for name in (*WRITTEN, "checkpoints")]
    folders += folder.glob("checkpoints/*")
    for path in (folder / ".lock", *folders, *written):
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            is_file = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
            is_checkpoints = path == folder / "checkpoints"
            if is_file or stat.S_ISDIR(facts.st_mode) or (is_checkpoints and _is_for_checkpoints(path)):
                continue
            link = ", or a link to a folder of yours that holds its checkpoints alone" * is_checkpoints
            raise UserError(
                f"{path} is a link, has a second name or is no file, and a run writes there; "
                f"put a copy in its place{link}"
            )


def _is_for_checkpoints(link: Path) -> bool:
    """Whether a link of one's own leads to one's own folder, in no other run, with checkpoints or nothing in it.

    Whose the link is says little: a run that came in an archive was unpacked by its new owner.
    """
    try:
        target = link.resolve(strict=True)
        is_own = link.lstat().st_uid == target.stat().st_uid == os.geteuid()
        is_of_another = target.parent != link.parent.resolve() and (target.parent / "config.yaml").exists()
        return is_own and not is_of_another and all(OF_CHECKPOINTS.fullmatch(one.name) for one in target.iterdir())
    except OSError:  # it leads nowhere, or to a file
        return False


def read_text(path: Path, what: str, limit_bytes: int) -> str:
    """The UTF-8 text of a file that may come from anybody.

    Raises:
        UserError: it is no regular file, has more than `limit_bytes`, or is not UTF-8.
        OSError: it cannot be read.
    """
    require_regular(path, what)
    with path.open("rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise _too_large(path, what, limit_bytes)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        hint = ", but UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW" if data.startswith(UTF_16) else ""
        raise UserError(f"{what} {path} is not UTF-8 text{hint}") from None


def read_object(path: Path, what: str, limit_bytes: int = 2**26) -> dict[str, Any]:
    """The JSON object of a file that may come from anybody.

    Raises:
        UserError: as `read_text`, or it is no JSON object.
        OSError: it cannot be read.
    """
    text = read_text(path, what, limit_bytes)
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:  # Python reads no number of more than 4,300 digits
        raise UserError(f"{what} {path} is not JSON ({error}); copy it again") from None
    if not isinstance(stored, dict):
        raise UserError(f"{what} {path} holds no JSON object; copy it again")
    return stored
