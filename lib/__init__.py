"""Tandem's floors: each module imports only from the floors below it (see the README's tree)."""

import importlib.util
import sys

if importlib.util.find_spec("pydantic") is None:  # not worth a traceback
    print(f"error: {sys.executable} has not what Tandem needs; make setup, then .venv/bin/python", file=sys.stderr)
    raise SystemExit(2)
