"""FedLC: logits are calibrated by how often each class occurs at a client."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import Batch, Client, Message, Method, Search


class FedLC(Method):
    """FedAvg with a loss that asks for larger margins where a class is rare (Zhang et al. 2022).

    Clients minimise the cross-entropy of the calibrated logits f_c − τ n_c^(−1/4), n_c the client's training samples of
    class c, but at least `least`. By the formula (`least=0`) a class that a client lacks has an infinite margin: it
    takes no part in the softmax, whatever τ > 0 is, and no client learns to tell such classes from its own.

    Limits: `tau=0` is FedAvg; so is, but for rounding, a federation whose clients have as many samples of each class.
    With `least=0`, a client with one class changes nothing. New clients: the global model.

    Deviations: a class without samples counts as having one. The loss is the softmax over all classes; the paper prints
    −log(e^(f_y − m_y) / Σ_{c ≠ y} e^(f_c − m_c)) with margins m_c, which leaves y out of the sum: this has no lower
    bound, and training by it collapses.
    """

    name: ClassVar[str] = "fedlc"
    paper: ClassVar[str] = (
        "Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022"
    )

    tau: float = Field(1.0, ge=0, description="strength of the calibration, τ (0: plain loss)")
    least: float = Field(
        1.0, ge=0, description="samples that a class has at least in the formula (0: the paper's, as it is)"
    )
    search: ClassVar[Search] = {"tau": "0.1..10:log"}

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        left_out = "it would ask for classes that a client lacks, which the softmax leaves out with least=0"
        return {} if self.least or not self.tau else {"label_smoothing": left_out}

    def train(self, client: Client, message: Message) -> Message:
        n_c = client.class_counts.clamp(min=self.least)
        margins = self.tau * n_c**-0.25  # infinite for a class that counts as 0 samples

        def objective(batch: Batch) -> Tensor:
            return batch.loss_function(batch.outputs - margins, batch.y)

        return {"theta": client.descend(message["theta"], objective=objective if self.tau else None)}
