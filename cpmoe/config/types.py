"""The strict block and the scalar types that recipe and JSON share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _number_from_text(value: object) -> object:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _zero_from_auto(value: object) -> object:
    return 0 if value == "auto" else value


def _int_from_whole_number(value: object) -> object:
    value = _number_from_text(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def tuple_from_list(value: object) -> object:
    """YAML and JSON have lists only; the fields are tuples, since blocks are frozen."""
    return tuple(value) if isinstance(value, list) else value


Number = Annotated[float, BeforeValidator(_number_from_text), Field(allow_inf_nan=False)]
"""A finite number; `1e-5`, which YAML 1.1 reads as text, is one."""
Fraction = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
CountOrAuto = Annotated[int, BeforeValidator(_zero_from_auto), Field(ge=0)]
Size = Annotated[int, BeforeValidator(_int_from_whole_number), Field(ge=0)]
"""A number of elements; JSON files write it as 5e8 as well."""
PositiveSize = Annotated[int, BeforeValidator(_int_from_whole_number), Field(ge=1)]


class Block(BaseModel):
    """A strict, frozen block of settings that refuses unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)
