"""PGFedMo: PGFed with a momentum of the auxiliary gradient."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Search
from fedtailor.methods.pgfed import PGFed


class PGFedMo(PGFed):
    """PGFed whose auxiliary gradient remembers the clients of earlier rounds (Luo et al. 2023, Eq. 15).

    A client mixes the g̃ that it receives with the one that it used last, however long ago. New clients: the global
    model. Limit: `beta=0` is PGFed.
    """

    name: ClassVar[str] = "pgfedmo"

    beta: float = Field(0.5, ge=0, lt=1, description="momentum of the auxiliary gradient, β")
    search: ClassVar[Search] = {**PGFed.search, "beta": "0..0.9"}

    def auxiliary_gradient(self, client: Client, g_tilde: Tensor) -> Tensor:
        if not self.beta:
            return g_tilde
        before = client.state.get("g_tilde", g_tilde)
        client.state["g_tilde"] = (1 - self.beta) * g_tilde + self.beta * before  # line 6
        return client.state["g_tilde"]
