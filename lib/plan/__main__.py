"""python -m lib.plan ..."""

import sys

from lib.plan.machine_choice import main

if __name__ == "__main__":
    sys.exit(main())
