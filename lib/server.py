"""python -m lib.server ...: the command of lib/serve/."""

import sys

from lib.serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
