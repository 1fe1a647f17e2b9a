"""The secret of a run, as its ranks have it: from their launcher, or from a file that the user gave every host."""

from __future__ import annotations

import os
from pathlib import Path

from lib.distributed.heartbeat import ADDRESS, agent_folder
from lib.errors import UserError
from lib.system import key_file

FILE = "secret"  # in the agent's folder, which is this user's alone


def run_secret() -> bytes | None:
    """What this run's ranks prove themselves by; None where nobody gave them anything.

    ./launch gives every start a secret of its own. mlx.launch, mpirun and schedulers give none: there the variable
    TANDEM_KEY_FILE may name a file, with the same line on every host.

    Raises:
        UserError: that file is not there, holds no key, or others may read it.
    """
    if ADDRESS in os.environ:
        path = Path(agent_folder()) / FILE
        try:
            return bytes.fromhex(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"the secret of this start cannot be read ({error}); start again by ./launch") from None
    if named := os.environ.get(key_file.VARIABLE):
        return key_file.read(Path(named))
    return None
