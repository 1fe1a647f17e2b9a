"""python -m lib.export ..."""

import os
import sys

from lib.system import mpi_and_blas

mpi_and_blas.prepare()  # before MLX is imported
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on GPUs: float32 products that are float32, to be compared

from lib.export.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
