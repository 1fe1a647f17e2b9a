"""python -m lib.evaluate ..."""

import sys

from lib.system import mpi_and_blas

mpi_and_blas.prepare()  # before MLX is imported

from lib.evaluate.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
