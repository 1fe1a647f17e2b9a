"""How a command ends on its user's errors: with one line and an exit status, never with a traceback."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import ParamSpec

from lib.errors import AgreedError, Stopped, UserError
from lib.system import mpi_and_blas, terminal

P = ParamSpec("P")


def reported(main: Callable[P, int]) -> Callable[P, int]:
    """The command. Its exit status: 2 for wrong input or a file that fails, 1 where it cannot go on, 130 at Ctrl-C."""

    @functools.wraps(main)
    def command(*arguments: P.args, **options: P.kwargs) -> int:
        try:
            return main(*arguments, **options)
        except UserError as error:
            # What all ranks agreed on is reported once.
            if not isinstance(error, AgreedError) or mpi_and_blas.launch_environment().rank == 0:
                terminal.error(str(error))
            return 2
        except OSError as error:
            terminal.error(f"{error.filename or 'a file'}: {error.strerror or error}")
            return 2
        except Stopped as error:
            terminal.error(str(error))
            return 1
        except KeyboardInterrupt:
            terminal.error("interrupted", "stopped")
            return 128 + signal.SIGINT

    return command
