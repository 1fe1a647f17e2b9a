"""What every section of the settings is, and the numbers that settings may be."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Nothing that is counted comes near these limits; beyond them libraries overflow, or memory ends.
Positive = Annotated[int, Field(gt=0, lt=2**53)]
Natural = Annotated[int, Field(ge=0, lt=2**53)]
Size = Annotated[int, Field(gt=0, le=2**20)]  # of a batch, or of an array's side
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # three years: no clock overflows
Gigabytes = Annotated[float, Field(gt=0, le=1e6)]


class Section(BaseModel):
    """Settings that belong together: frozen, without unknown names, each with its meaning behind it."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)
