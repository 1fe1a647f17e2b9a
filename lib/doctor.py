"""python -m lib.doctor, make doctor: lib/launch/doctor.py."""

import sys

from lib.launch.doctor import main

if __name__ == "__main__":
    sys.exit(main())
