"""The server's rule for late clients as a setting of the experiment: whom a round waits for."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from fedtailor.experiment.parts import Parts


class Late(Parts):
    """The rule for late clients, where a round does not wait for everybody.

    `deadline` is in virtual seconds: who is not done by then does not count; with `partial`, a client that would be
    too late takes as many steps as it has time for. `first` counts the first so many replies, and calls off the rest:
    ask for more. With `buffer`, rounds are asynchronous: the server moves after every so many replies, whoever is
    still at work goes on, and a change that is s rounds old counts (1 + s)^-staleness.
    """

    example: ClassVar[str] = "deadline=30, first=10 or buffer=5"
    bare: ClassVar[bool] = False

    deadline: float | None = Field(None, gt=0)
    partial: bool = False
    first: int | None = Field(None, ge=1, le=10**9)
    buffer: int | None = Field(None, ge=1, le=10**9)
    staleness: float = Field(0.5, ge=0)

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.buffer is None and self.deadline is None and self.first is None:
            raise ValueError("one of deadline, first and buffer")
        if self.buffer is not None and (self.deadline is not None or self.first is not None):
            raise ValueError("either buffer, or deadline and first")
        if self.buffer is None and self.staleness != 0.5:
            raise ValueError("staleness with buffer alone")
        if self.partial and self.deadline is None:
            raise ValueError("partial with a deadline")
        return self
