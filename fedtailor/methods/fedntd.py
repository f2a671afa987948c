"""FedNTD: local training keeps what the global model thinks of the classes that a sample is not of."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div, one_hot

from fedtailor.method import Batch, Client, Message, Method, Search


class FedNTD(Method):
    """FedAvg with distillation of the received model on all but the true class of each sample (Lee et al. 2022).

    f and g are the logits of a sample under the present and the received model, f_¬y and g_¬y those of the C − 1
    classes that it is not of. A client's loss is ℓ_sup + β τ² KL(softmax(g_¬y / τ) ‖ softmax(f_¬y / τ)). The received
    model sees all samples once a round, in evaluation mode.

    Limits: `beta=0` is FedAvg. So is, but for rounding, a federation with two classes, and one in which every client
    takes a single step on all its samples: at g the divergence has no gradient. New clients: the global model.

    Deviation: g is of the samples as they are, also where they are augmented for training.
    """

    name: ClassVar[str] = "fedntd"
    paper: ClassVar[str] = (
        "Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022"
    )

    beta: float = Field(1.0, ge=0, description="weight of the distillation, β (0: plain loss)")
    temperature: float = Field(1.0, gt=0, description="temperature of the distillation, τ")
    search: ClassVar[Search] = {"beta": "0.1..10:log"}

    def train(self, client: Client, message: Message) -> Message:
        theta, tau, classes = message["theta"], self.temperature, len(client.class_counts)
        g = client.outputs(theta) / tau if self.beta else theta

        def objective(batch: Batch) -> Tensor:
            received, wrong = g if batch.indices is None else g[batch.indices], one_hot(batch.y, classes) == 0
            of_g, of_f = (f[wrong].view(len(f), -1).log_softmax(1) for f in (received, batch.outputs / tau))
            distance = kl_div(of_f, of_g, reduction="batchmean", log_target=True)
            return batch.loss + self.beta * tau**2 * distance

        return {"theta": client.descend(theta, objective=objective if self.beta else None)}
