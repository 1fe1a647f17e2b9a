"""Sends an export to the Hugging Face hub."""

import sys
from pathlib import Path

from lib.errors import Stopped, UserError, in_one_line

REFUSED = (401, 403, 404)


def push(folder: Path, repository: str, private: bool) -> str:
    """Sends an export to owner/name in one commit; returns its address. Raises UserError: the hub refuses the name or
    the token; Stopped: there is no way to the hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    api = HfApi()
    what = f"--push {repository}: {api.endpoint}"
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        made = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise UserError("--private: that repository is public already; give another name")
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.resolve().name}")
    except (UserError, HFValidationError, LocalTokenNotFoundError) as error:
        raise UserError(f"{what}: {in_one_line(error)}") from None
    except Exception as error:  # the client raises a dozen unrelated types, some wrapped in others
        cause: BaseException | None = error
        while cause and not isinstance(cause, HfHubHTTPError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, HfHubHTTPError) and (status := cause.response.status_code) in REFUSED:
            remedy = "take one with write access (`hf auth login`, HF_TOKEN), or another name"
            raise UserError(f"{what}: status {status}, the token may not write there; {remedy}") from None
        again = f"what was sent stays there, and the same command goes on; the export is in {folder}"
        raise Stopped(f"{what}: {in_one_line(cause or error)}; {again}") from None
    return made
