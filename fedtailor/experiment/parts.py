"""Settings of several parts, as text or as a table: `client, clip=1.0` or `{level = "client", clip = 1.0}`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedtailor._common.errors import shown, wanted


class Parts(BaseModel):
    """A setting of several parts. Where it is `bare`, its first field may stand in the text without its name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    example: ClassVar[str] = ""
    bare: ClassVar[bool] = True

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read the setting from text, or from a table. A wrong one is a ValueError that says what it must be."""
        if isinstance(value, cls):
            return value
        given = dict(value) if isinstance(value, Mapping) else cls._split(value)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            if not name:  # of several parts together
                problem = wanted(first)
            elif first["type"] == "extra_forbidden":
                problem = f"it has no part {name!r}, only {', '.join(cls.model_fields)}"
            elif first["type"] == "missing":
                problem = f"it does not say {name!r}"
            else:
                problem = f"its {name} is {shown(first['input'])}, but must be {wanted(first)}"
            raise ValueError(f"like {cls.example}; {problem}") from None

    @classmethod
    def _split(cls, value: Any) -> dict[str, str]:
        """Split text into named parts. A comma inside of a value stays there: `clients=3,5`."""
        parts: dict[str, str] = {}
        names, last = iter(cls.model_fields), ""
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"like {cls.example}")
        for number, piece in enumerate(value.split(",")):
            name, equals, text = (word.strip() for word in piece.partition("="))
            if not equals and number == 0 and cls.bare:
                name, text = next(names), name
            elif not equals and not cls.bare:
                text = "true"
            elif not equals and last:
                parts[last] += f",{name}"
                continue
            if name in parts:
                raise ValueError(f"like {cls.example}; it says {name!r} twice")
            parts[name], last = text, name if number else ""
        return parts

    def __str__(self) -> str:
        """Write all parts that differ from their default, as `parse` reads them."""
        fields = list(type(self).model_fields.items())
        bare = [str(getattr(self, fields.pop(0)[0]))] if self.bare else []
        given = [(name, getattr(self, name)) for name, field in fields if getattr(self, name) != field.get_default()]
        return ", ".join([*bare, *(f"{name}={_text(value)}" for name, value in given)])


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
