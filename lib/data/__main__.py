"""python -m lib.data --inspect ..."""

import sys

from lib.data.inspect import main

if __name__ == "__main__":
    sys.exit(main())
