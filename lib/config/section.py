"""What every section of the settings is, and the numbers that settings may be."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_truth_value(value: Any) -> Any:
    """Python takes true for 1, and YAML reads `yes` and `on` as true."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Integer = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]
# Nothing that is counted comes near these limits; beyond them libraries overflow, or memory ends.
Positive = Annotated[Integer, Field(gt=0, lt=2**53)]
Natural = Annotated[Integer, Field(ge=0, lt=2**53)]
Size = Annotated[Integer, Field(gt=0, le=2**20)]  # of a batch, or of an array's side
Fraction = Annotated[Float, Field(ge=0, le=1)]
NonNegative = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[Float, Field(gt=0, le=1e8)]  # three years: no clock overflows
Gigabytes = Annotated[Float, Field(gt=0, le=1e6)]


class Section(BaseModel):
    """Settings that belong together: frozen, without unknown names, each with its meaning behind it."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)
