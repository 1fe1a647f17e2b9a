"""An export sent to the Hugging Face hub, in one commit.

Large files go first, one after another; the hub keeps what it got, and is asked before each. So the same command goes
on where a killed one ended, and a repository never holds a part of an export.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lib.errors import Stopped, UserError
from lib.export.push_checks import SentFile, files_to_send
from lib.system.terminal import Voice

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REFUSED = {
    401: "it does not take the token: `hf auth login` with one that may write, or set HF_TOKEN",
    403: "the token may not write there: take one with write access, or a name of your own",
    404: "there is no such owner, or the token may not see it",
    409: "it has changed meanwhile; the same command again",
}
FULL = (402, 413, 507)  # payment required, payload too large, insufficient storage


def push(folder: Path, repository: str, private: bool, say: Voice) -> str:
    """Sends an export to owner/name, which is made if it is not there; returns its address.

    Raises:
        UserError: the files hold a secret or data, or the hub refuses the name or the token.
        Stopped: there is no way to the hub, or no room; the same command goes on.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    found = files_to_send(folder)
    api = HfApi()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _explained(repository, folder, api.endpoint):
        made = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise UserError(
                f"--push {repository} --private: that repository is public already; make it private in its settings, "
                "or give another name"
            )
        additions = [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file.path) for file in found]
        for file, addition in zip(found, additions, strict=True):
            api.preupload_lfs_files(repository, [addition], free_memory=False)
            say.line(f"{file.name}  {file.bytes:,} bytes")
        api.create_commit(repository, additions, commit_message=f"Upload {folder.resolve().name}")
        _require_all(found, api, repository)
    return str(made)


def describe(found: Sequence[SentFile]) -> list[str]:
    """What would be sent: a line a file, and one for all."""
    width = max(len(file.name) for file in found)
    total = sum(file.bytes for file in found)
    return [
        *(f"{file.name:<{width}}  {file.bytes:>15,} bytes" for file in found),
        f"{len(found)} files, {total:,} bytes",
    ]


def require_name(repository: str) -> None:
    """Raises UserError unless it is OWNER/NAME as the hub takes it."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push {repository}: {str(error).splitlines()[0]}") from None
    if repository.count("/") != 1:
        raise UserError(
            f"--push {repository}: give OWNER/NAME, as in --push {os.environ.get('USER', 'ann')}/{repository}"
        )


def _require_all(found: Sequence[SentFile], api: HfApi, repository: str) -> None:
    """Raises Stopped unless the hub has every file, of its size."""
    there = {file.rfilename: file.size for file in api.model_info(repository, files_metadata=True).siblings or ()}
    missing = [file.name for file in found if there.get(file.name) != file.bytes]
    if missing:
        raise Stopped(f"--push {repository}: after the commit the hub does not have {', '.join(missing)}; try again")


@contextlib.contextmanager
def _explained(repository: str, folder: Path, endpoint: str) -> Iterator[None]:
    """Turns what the hub's client raises into one line.

    Raises:
        UserError: what the user can change: name, token, rights.
        Stopped: the rest.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except (UserError, Stopped):
        raise
    except Exception as error:  # the client raises a dozen unrelated types, some wrapped in others
        causes = list(_causes(error))
        answer = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
        again = f"what was sent stays there, and the same command goes on; the export is in {folder}"
        what = f"--push {repository}: {endpoint}"
        if any(isinstance(cause, LocalTokenNotFoundError) for cause in causes):
            raise UserError(f"{what}: {REFUSED[401]}") from None
        if answer is None:
            raise Stopped(f"{what} cannot be reached ({_line(causes[-1])}); {again}") from None
        status = answer.response.status_code
        said = _line(answer.server_message or answer)
        if status in FULL or "quota" in said.lower():
            raise Stopped(f"{what} has no room for it ({status}: {said}); free some: {again}") from None
        if status in REFUSED:
            raise UserError(f"{what} refuses ({status}: {said}): {REFUSED[status]}") from None
        raise Stopped(f"{what} answers {status}: {said}; {again}") from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: object) -> str:
    """An error's first line, or its type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
