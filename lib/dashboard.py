"""python -m lib.dashboard ... (lib/report/command.py)"""

import sys

from lib.report.command import main

if __name__ == "__main__":
    sys.exit(main())
