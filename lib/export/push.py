"""An export sent to the Hugging Face hub, in one commit. Files that the hub has already are not sent again."""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path

from lib.errors import Stopped, UserError

# An export has none of these: such a file is in its folder by mistake.
NOT_SENT = (".env", "*.env", ".netrc", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "*.jsonl", "*.parquet", "*.csv")
REFUSED = {
    401: "it does not take the token: `hf auth login` with one that may write, or set HF_TOKEN",
    403: "the token may not write there: take one with write access, or a name of your own",
    404: "there is no such owner, or the token may not see it",
    409: "it has changed meanwhile; the same command again",
}
FULL = (402, 413, 507)  # payment required, payload too large, insufficient storage


def push(folder: Path, repository: str, private: bool) -> str:
    """Sends an export to owner/name, which is made if it is not there; returns its address.

    Raises:
        UserError: the files hold a secret or data, or the hub refuses the name or the token.
        Stopped: there is no way to the hub, or no room; the same command goes on.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    files_to_send(folder)
    api = HfApi()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _in_one_line(f"--push {repository}: {api.endpoint}", folder):
        made = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise UserError(f"--push {repository} --private: that repository is public already; give another name")
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.resolve().name}")
    return str(made)


def files_to_send(folder: Path) -> list[Path]:
    """The files of an export.

    Raises:
        UserError: one of them is data or a secret by its name.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        if any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in NOT_SENT):
            raise UserError(f"--push: {path} is data or a secret by its name; nothing was sent. Remove it")
    return paths


def require_name(repository: str) -> None:
    """Raises UserError unless it is OWNER/NAME as the hub takes it."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push {repository}: {str(error).splitlines()[0]}") from None
    if repository.count("/") != 1:
        raise UserError(f"--push {repository}: give OWNER/NAME, as in --push ann/{repository}")


@contextlib.contextmanager
def _in_one_line(what: str, folder: Path) -> Iterator[None]:
    """Turns what the hub's client raises into UserError (name, token, rights) or Stopped (the rest)."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except (UserError, Stopped):
        raise
    except Exception as error:  # the client raises a dozen unrelated types, some wrapped in others
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        again = f"what was sent stays there, and the same command goes on; the export is in {folder}"
        if any(isinstance(cause, LocalTokenNotFoundError) for cause in causes):
            raise UserError(f"{what}: {REFUSED[401]}") from None
        answer = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
        if answer is None:
            raise Stopped(f"{what} cannot be reached ({str(causes[-1]).strip().split(chr(10))[0]}); {again}") from None
        status, reason = answer.response.status_code, " ".join(str(answer.server_message or answer).split())
        if status in FULL:
            raise Stopped(f"{what} has no room for it ({status}: {reason}); free some: {again}") from None
        if status in REFUSED:
            raise UserError(f"{what} refuses ({status}: {reason}): {REFUSED[status]}") from None
        raise Stopped(f"{what} answers {status}: {reason}; {again}") from None
