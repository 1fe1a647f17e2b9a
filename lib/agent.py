"""python -m lib.agent: what ./launch starts on every host; lib/launch/host_agent.py."""

import sys

from lib.launch.host_agent import main

if __name__ == "__main__":
    sys.exit(main())
