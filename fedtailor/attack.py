"""Hostile clients as a setting of the experiment, for tests and studies: what they do, and who they are."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from fedtailor.local.streams import numpy_stream
from fedtailor.parts import Parts

Kind = Literal[
    "sign-flip", "scaling", "gaussian", "label-flip", "little", "backdoor", "nan", "wrong-shape", "wrong-name", "replay"
]


class Attack(Parts):
    """An attack of some clients.

    `clients` is their share of all training clients, drawn by the experiment's seed, or their numbers. `factor` is the
    strength: by how much a change is multiplied, the deviation of Gaussian noise as a multiple of the change's norm,
    or the number of standard deviations (little). By default each kind has its own.
    """

    example: ClassVar[str] = "sign-flip, clients=0.2"

    kind: Kind
    clients: float | tuple[int, ...] = 0.2
    factor: float | None = Field(None, gt=0, le=1e9)

    @field_validator("clients", mode="before")
    @classmethod
    def _clients(cls, value: object) -> float | tuple[int, ...]:
        listed = value.split(",") if isinstance(value, str) and "," in value else value
        try:
            if isinstance(listed, list | tuple):
                numbers = tuple(sorted({int(str(number)) for number in listed}))
                if numbers and numbers[0] >= 0:
                    return numbers
            elif 0 < (share := float(str(value))) < 1:
                return share
        except ValueError:
            pass
        raise ValueError("a share between 0 and 1, or clients' numbers with commas between them")

    def hostile(self, n_clients: int, seed: int) -> list[int]:
        """The numbers of the hostile clients among so many: those that are named, or at least one by the seed."""
        if isinstance(self.clients, tuple):
            return [client for client in self.clients if client < n_clients]
        count = max(1, round(self.clients * n_clients))
        drawn = numpy_stream(seed, "hostile").choice(n_clients, min(count, n_clients), replace=False)
        return sorted(int(client) for client in drawn)
