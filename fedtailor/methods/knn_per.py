"""kNN-Per: the global model beside each client's memory of its own samples' features."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import nll_loss

from fedtailor._common.errors import FedtailorError
from fedtailor.method import Client, Message, Search, Server
from fedtailor.methods.fedavg import FedAvg
from fedtailor.training.inputs import Inputs

SHARES = [tenth / 10 for tenth in range(11)]  # that are tried for the memory
UNTRIED = 0.5  # the share where there are no validation samples
AT_ONCE = 1024  # samples that are looked up at once, for memory


class KNNPer(FedAvg):
    """FedAvg, and each client mixes its predictions with those of a memory of its samples (Marfoq et al. 2022).

    The memory has the features z_j = φ(x_j) of the client's training samples under the global model. Of a sample with
    features z, the k nearest vote: p_kNN(c) ∝ Σ_{j: y_j = c} exp(−‖z − z_j‖² / (σ m)), m the number of features. The
    prediction is λ p_kNN + (1 − λ) softmax(f), with the λ of 0, 0.1, … 1 that predicts the client's validation samples
    best. What crosses is FedAvg's alone.

    Limits: training is FedAvg's, bit for bit; `lam=0` predicts as FedAvg does. With `lam=1` and `k=1` it is the nearest
    neighbour. New clients: the same as all others.

    Deviations: the paper's kernel is named by the distance; as in the release, it is by its square over m. Without
    validation samples, λ is 0.5.
    """

    name: ClassVar[str] = "knn-per"
    title: ClassVar[str] = "kNN-Per"
    paper: ClassVar[str] = "Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022"
    shared_part: ClassVar[str] = "the model"
    own_part: ClassVar[str] = "a memory of its samples' features"

    k: int = Field(10, ge=1, description="neighbours that vote, k")
    scale: float = Field(1.0, gt=0, description="width of the kernel, σ: smaller is for near neighbours alone")
    lam: float | None = Field(None, ge=0, le=1, description="share of the memory, λ (none: by validation samples)")
    search: ClassVar[Search] = {"k": "1..20", "scale": "0.01..10:log"}

    def start(self, server: Server) -> None:
        if server.layout.n_features is None:
            raise FedtailorError("kNN-Per needs a network that can be cut between its body and its head: set head=1.")
        super().start(server)

    def predict(self, client: Client, message: Message, x: Inputs) -> Tensor:
        network, memory = self.both(client, message["theta"], x)
        lam = self.chosen(client, message["theta"]) if self.lam is None else self.lam
        mixed = lam * memory + (1 - lam) * network
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()

    def both(self, client: Client, theta: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
        """Compute the network's probabilities and the memory's."""
        z, known, classes = client.flat_features(theta, x), client.flat_features(theta), len(client.class_counts)
        pieces = [self.votes(piece, known, client.train_data[1], classes) for piece in z.split(AT_ONCE)]
        return client.outputs(theta, x).softmax(1), torch.cat(pieces)

    def votes(self, z: Tensor, known: Tensor, y: Tensor, classes: int) -> Tensor:
        """Have the k nearest of the known vote on each sample."""
        nearest = torch.cdist(z, known).square().topk(min(self.k, len(known)), largest=False)
        weights = (-nearest.values / (self.scale * z.shape[1])).softmax(1)  # of votes that add up to 1
        return z.new_zeros(len(z), classes).scatter_add(1, y[nearest.indices], weights)

    def chosen(self, client: Client, theta: Tensor) -> float:
        """Find the share of the memory by which validation samples are most probable."""
        x, y = client.validation_data
        if not len(y):
            return UNTRIED
        network, memory = self.both(client, theta, x)
        mixes = (lam * memory + (1 - lam) * network for lam in SHARES)
        losses = [float(nll_loss(mix.clamp(min=torch.finfo(mix.dtype).tiny).log(), y)) for mix in mixes]
        return SHARES[losses.index(min(losses))]
