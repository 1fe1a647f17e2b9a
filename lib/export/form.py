"""What a form of export is: a module with the functions of `Form`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import mlx.nn as nn
import numpy as np

from lib.export.trained_run import TrainedRun

Logps = list[np.ndarray]  # a row: float32 [tokens - 1], log-probability of every token but the first, in nats


@dataclass(frozen=True)
class Reading:
    """What a reader makes of an export.

    Args:
        logps: of the export.
        base: of the base model by itself, where the reader has other code for it than mlx-lm.
    """

    logps: Logps
    base: Logps | None = None


WeightType = Literal["f32", "bf16", "f16", "q8_0"]


@dataclass(frozen=True)
class ExportOptions:
    """What one asks of an export, besides its form.

    Args:
        type: of the stored weights; None for the base model's own.
        dequantize: store the weights of a quantised base as plain ones.
        peft_python: the Python that has peft and transformers; None for this one.
    """

    type: WeightType | None = None
    dequantize: bool = False
    peft_python: str | None = None


class Form(Protocol):
    """A module that writes one form of export, and reads it as others will."""

    @property
    def READER(self) -> str:
        """What reads the export in its proof, by name."""
        ...

    def check(self, run: TrainedRun, options: ExportOptions, prove: bool) -> None:
        """Looks whether the run can be written so (and, to be proven, read), before a model is loaded.

        Raises:
            UserError: it cannot; says what to do instead.
        """
        ...

    def write(self, run: TrainedRun, folder: Path, options: ExportOptions) -> None:
        """Writes the export's files into an empty folder."""
        ...

    def stored_model(self, run: TrainedRun, options: ExportOptions) -> nn.Module | None:
        """The model with its weights rounded as the export's type rounds them, then float32; None where nothing is."""
        ...

    def read_logps(self, run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
        """The log-probabilities of `run.rows` by the export's own reader, in float32."""
        ...
