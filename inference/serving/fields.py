"""What the fields of a request must be: one sentence each, which the error for any other value says."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Predicate
from pydantic import BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

BROKEN_RULE = "broken_rule"
"""The type of pydantic's error for a value that is not what `must_be` says."""

_OF_A_PART = (BROKEN_RULE, "value_error", "extra_forbidden", "missing")


def shown(value: Any) -> str:
    """A value as an error writes it, a long one cut."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def must_be(rule: str, remedy: str = "leave it out") -> WrapValidator:
    """Annotation of a field: what it must be, in words; an error inside it that says its own place is kept."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            if error.errors(include_url=False)[0]["type"] in _OF_A_PART:
                raise
            told = f"must be {rule}; got {shown(value)}; {remedy}"
            raise PydanticCustomError(BROKEN_RULE, "{told}", {"told": told}) from None

    return WrapValidator(check)


def _whole(value: Any) -> Any:
    """JSON has one type of numbers: 10.0 is 10."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float | None, must_be("a number")]
Switch = Annotated[bool | None, must_be("true or false")]
Text = Annotated[str, Predicate(bool)]
Limit = Annotated[Annotated[Whole, Field(ge=1)] | None, must_be("a whole number of at least 1")]
