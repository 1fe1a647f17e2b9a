"""python -m lib.dashboard ... (lib/report/page.py)"""

import sys

from lib.report.page import main

if __name__ == "__main__":
    sys.exit(main())
