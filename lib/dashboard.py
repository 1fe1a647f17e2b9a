"""python -m lib.dashboard ... (lib/report/dashboard.py)"""

import sys

from lib.report.command import main

if __name__ == "__main__":
    sys.exit(main())
