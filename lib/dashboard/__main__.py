"""python -m lib.dashboard ..."""

import sys

from lib.dashboard.command import main

if __name__ == "__main__":
    sys.exit(main())
