"""One backend: mlx_lm.server at a Unix socket, for the gateway that started it alone.

    python -m lib.serve.backend_process --model PATH [--adapter PATH] [--fuse] [--concurrency N]
        [--wired auto|always|never] [--chat-template FILE] [--chat-template-args JSON]

The first line of its standard input is a JSON object: `secret`, which every request has to bring, and `socket`, the
path of the Unix socket, in a folder that its user alone can enter. Without a path it makes such a folder and prints
where. So no other user of the host takes its place or reaches a server that would load any model it is asked for, and
nothing of this is on a command line. When standard input ends, the gateway is gone, whichever way and on whichever
host, and the backend ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from lib.serve import backend_link
from lib.system import metal, model_folder, mpi_and_blas


def main(arguments: list[str] | None = None) -> None:
    """Serves until standard input ends."""
    options = _parse(arguments)
    line = sys.stdin.readline()
    if not line:  # the gateway ended before it said anything
        return
    told = json.loads(line)
    path = Path(told["socket"]) if told["socket"] else backend_link.socket_folder() / "backend"
    threading.Thread(target=_end_with_input, args=(path,), daemon=True).start()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ["MLX_MPI_LIBNAME"] = (
        "none"  # mlx_lm.server asks MLX for other ranks; MPI would listen on a port for them
    )
    mpi_and_blas.load_blas()
    model = str(model_folder.resolve(options.model, options.revision))
    where = ["--model", model]
    if options.fuse and options.adapter:
        where = ["--model", str(fused(Path(model), Path(options.adapter), options.trust_remote_code))]
    elif options.adapter:
        where += ["--adapter-path", options.adapter]
    if options.trust_remote_code:
        where.append("--trust-remote-code")
    sys.argv = ["mlx_lm.server", *where, *server_words(options)]

    from mlx_lm import server

    from lib.serve import backend_server

    metal.keep_wired(options.wired, sum(path.stat().st_size for path in Path(where[1]).glob("*.safetensors")))
    _stop_at_every_end(server)
    server.run = backend_server.run_at(path, told["secret"])
    if not told["socket"]:
        print(f"{backend_link.LISTENS}{path}", flush=True)
    try:
        server.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # the thread that generates would keep the process


def server_words(options: argparse.Namespace) -> list[str]:
    """mlx_lm.server's words beside those of the model."""
    # No origin is "": the gateway decides what a browser may do.
    words = ["--allowed-origins", "", "--log-level", "WARNING", "--decode-concurrency", str(options.concurrency)]
    # All that are taken are read at once, and the gateway's own question whether it answers: what waits outside of a
    # batch gives no sign of life, and cannot be stopped.
    words += ["--prompt-concurrency", str(options.concurrency + 1)]
    words += ["--chat-template-args", options.chat_template_args]
    if options.chat_template:
        words += ["--chat-template", Path(options.chat_template).read_text(encoding="utf-8")]
    return words


def fused(model: Path, adapter: Path, trusts_code: bool) -> Path:
    """The folder of the model with the adapter fused into it, beside the adapter; made where it is missing."""
    digest = _digest_of_fused(model, adapter)
    folder, partial = adapter / f"fused-{digest}", adapter / f"fused-{digest}.{os.getpid()}"
    if not folder.exists():
        words = ["fuse", "--model", str(model), "--adapter-path", str(adapter), "--save-path", str(partial)]
        words += ["--trust-remote-code"] * trusts_code
        try:
            subprocess.run([sys.executable, "-m", "mlx_lm", *words], check=True, stdin=subprocess.DEVNULL)
            with contextlib.suppress(OSError):  # another backend on this disk has made it
                partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _digest_of_fused(model: Path, adapter: Path) -> str:
    """Of all that it is made of; of the model's files, which may be large, the places, sizes and times."""
    digest = hashlib.sha256()
    for path in (adapter / model_folder.ADAPTER_WEIGHTS, adapter / model_folder.ADAPTER_CONFIG):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    for path in sorted(model.resolve().iterdir()):
        facts = path.stat()
        digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def _stop_at_every_end(server: Any) -> None:
    """Ends answers where training ended them: mlx-lm takes generation_config.json's end tokens in the others' place."""
    load = server.load

    def load_with_ends(path: str, *arguments: Any, **options: Any) -> Any:
        loaded = load(path, *arguments, **options)
        loaded[1].eos_token_ids |= model_folder.end_ids(Path(path))
        return loaded

    server.load = load_with_ends


def _end_with_input(path: Path) -> None:
    while sys.stdin.buffer.raw.read(1024):  # type: ignore[union-attr]
        pass
    with contextlib.suppress(OSError):  # where the gateway was killed, nobody else tidies up
        backend_link.remove(path)
    os._exit(0)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lib.serve.backend_process", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--revision")
    parser.add_argument("--adapter")
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--chat-template", help="file of a template in the place of the model's")
    parser.add_argument("--chat-template-args", default="{}", help="what the run's prompts were rendered with")
    parser.add_argument("--wired", default="auto", help="metal.wired of the run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
