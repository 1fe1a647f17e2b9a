"""What an optimizer keeps between steps, and takes during an update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerNeeds:
    """What an optimizer keeps and takes, in float32 numbers for one that is trained; measured on a CPU."""

    moments: float = 2  # that it keeps
    update: float = 5.2  # that updating an array makes on the way, until all of it is done
    slice_update: float = 0  # the same, where no more than a slice is updated at a time (lib/training/optimizers.py)


OPTIMIZERS = {
    "adafactor": OptimizerNeeds(0.02, 6.0),
    "adagrad": OptimizerNeeds(1, 4.6),
    "adadelta": OptimizerNeeds(2, 7.2),
    "adamw_8bit": OptimizerNeeds(0.51, 2.2, 36),
    "lion": OptimizerNeeds(1, 5.6),
    "muon": OptimizerNeeds(1, 13.0),
    "rmsprop": OptimizerNeeds(1, 4.3),
    "sgd": OptimizerNeeds(1, 1.3),
}
ADAM = OptimizerNeeds()  # and all others
