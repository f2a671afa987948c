"""FedALA: every client begins with a mix of the global and its own last model, which it learns entry by entry."""

from dataclasses import replace
from statistics import fmean, pstdev
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Batch, Client, Layout, Message, Method, Search
from fedtailor.training.inputs import select

PASSES = 10  # of which the last losses must be alike, for W to have converged


class FedALA(Method):
    """FedAvg that begins from θ_i + (θ − θ_i) ⊙ W_i in the p highest layers, with a learned W_i (Zhang et al. 2023).

    Adaptive local aggregation (Algorithm 1, lines 6 to 16): θ is the global model, θ_i the client's last one, W_i has a
    weight in [0, 1] for every entry of the p highest layers, at first 1. Below them, the global model counts alone. W_i
    learns by gradient steps on s of the samples, drawn anew in each round: at the client's first visit at which θ_i
    differs from θ until its loss no longer changes, later in one pass. From the mix, the client trains and uploads the
    whole model as in FedAvg.

    Limits: `p=0` or `eta=0` trains as FedAvg does. New clients: the global model.

    Deviations: p counts layers of the network (those with parameters, normalisation too), as in the paper; the release
    counts tensors, so that its 1 is the bias of the last layer alone. The samples are a random part from a seeded
    stream; the release takes a contiguous slice. The loss of a pass is the mean over its batches, in place of its last
    batch, and its repetition ends after `most_passes`, which the release does not bound.
    """

    name: ClassVar[str] = "fedala"
    paper: ClassVar[str] = (
        "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023"
    )
    shared_part: ClassVar[str] = "the model"
    own_part: ClassVar[str] = "its last model, and how much of it stays in the highest layers"

    keeps_model: ClassVar[bool] = True

    p: int = Field(1, ge=0, description="number of highest layers that are mixed, p (more than there are: all)")
    s: float = Field(0.8, gt=0, le=1, description="share of the samples by which the weights learn, s")
    eta: float = Field(1.0, ge=0, description="learning rate of the weights, η")
    threshold: float = Field(0.1, ge=0, description="standard deviation of the last losses that is convergence")
    most_passes: int = Field(50, ge=1, description="bound of the passes in which the weights learn first")
    search: ClassVar[Search] = {"p": "1..2", "eta": "0.1..10:log"}

    def train(self, client: Client, message: Message) -> Message:
        client.state["theta"] = client.descend(self.aggregated(client, message["theta"]))
        return {"theta": client.state["theta"]}

    def aggregated(self, client: Client, theta: Tensor) -> Tensor:
        """Mix the global model θ into the client's own (Algorithm 1, lines 6 to 16), and keep the weights."""
        high = self.highest(client.layout)
        own, mixed = client.state.get("theta", client.initial)[high], theta.clone()
        away = theta[high] - own
        if not away.any():  # there is nothing to weigh
            return mixed
        W = client.state.get("W", torch.ones_like(own))
        sampled, seen, losses = self.sampled(client), list[float](), list[float]()

        def objective(batch: Batch) -> Tensor:
            seen.append(float(batch.loss.detach()))
            return batch.loss

        for _ in range(1 if "W" in client.state else self.most_passes):
            for batch in sampled.batches(purpose="weights", epochs=1, steps=None):
                mixed[high] = own.lerp(theta[high], W)  # θ̂ = θ_i + (θ − θ_i) ⊙ W
                gradient = client.gradient(mixed, batch, objective)[high]
                W = (W - self.eta * gradient * away).clamp(0, 1)  # by the chain rule: ∇_W f = ∇_θ̂ f ⊙ (θ − θ_i)
            losses.append(fmean(seen))
            seen.clear()
            if len(losses) > PASSES and pstdev(losses[-PASSES:]) < self.threshold:
                break
        client.state["W"] = W
        mixed[high] = own.lerp(theta[high], W)
        return mixed

    def highest(self, layout: Layout) -> slice:
        """Find the slice of the p highest layers."""
        places = list(layout.layers.values())
        end = layout.head.stop
        return slice(places[-self.p :][0].start if self.p else end, end)

    def sampled(self, client: Client) -> Client:
        """Make a client that has a part of the samples alone, drawn anew in each round."""
        (x, y), count = client.train_data, max(1, round(self.s * client.n_samples))
        order = torch.randperm(client.n_samples, generator=client.stream("sample"), device="cpu")
        chosen = order[:count].to(y.device)
        return replace(client, train_data=(select(x, chosen), select(y, chosen)))

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else message["theta"]
