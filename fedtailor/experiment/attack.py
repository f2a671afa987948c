"""Hostile clients as a setting of the experiment, for tests and studies: what they do, and who they are."""

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from fedtailor.experiment.parts import Parts
from fedtailor.training.streams import numpy_stream

Kind = Literal[
    "sign-flip", "scaling", "gaussian", "label-flip", "little", "min-max", "inner-product", "backdoor", "nan",
    "wrong-shape", "wrong-name", "replay",
]  # fmt: skip

WITHOUT_FACTOR = ("label-flip", "min-max", "nan", "wrong-shape", "wrong-name", "replay")


class Attack(Parts):
    """An attack of some clients.

    `clients` is their share of all training clients, drawn by the experiment's seed, or their numbers. `factor` is the
    strength: by how much a change is multiplied (inner-product: minus the mean of the honest ones), the norm of
    Gaussian noise as a multiple of the change's, or the number of standard deviations (little). By default each kind
    has its own.
    """

    example: ClassVar[str] = "sign-flip, clients=0.2"

    kind: Kind
    clients: float | tuple[int, ...] = 0.2
    factor: float | None = Field(None, gt=0, le=1e9)

    @field_validator("clients", mode="before")
    @classmethod
    def _clients(cls, value: object) -> float | tuple[int, ...]:
        text = str(value).strip()
        listed = value if isinstance(value, list | tuple) else text.split(",")
        try:
            if isinstance(value, list | tuple) or not text.strip("0123456789, "):  # whole numbers are clients'
                numbers = tuple(sorted({int(str(number)) for number in listed}))
                if numbers and numbers[0] >= 0:
                    return numbers
            elif 0 < (share := float(text)) < 1:
                return share
        except ValueError:
            pass
        raise ValueError("a share between 0 and 1, or clients' numbers (3,7)")

    @field_validator("factor")
    @classmethod
    def _factor(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and (kind := info.data.get("kind")) in WITHOUT_FACTOR:
            raise ValueError(f"left out: {kind} has none")
        return value

    def hostile(self, n_clients: int, seed: int) -> list[int]:
        """The numbers of the hostile clients among so many: those that are named, or at least one by the seed."""
        if isinstance(self.clients, tuple):
            return [client for client in self.clients if client < n_clients]
        count = max(1, round(self.clients * n_clients))
        drawn = numpy_stream(seed, "hostile").choice(n_clients, min(count, n_clients), replace=False)
        return sorted(int(client) for client in drawn)
