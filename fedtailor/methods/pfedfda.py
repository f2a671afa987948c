"""pFedFDA: heads are computed from Gaussians of the features, mixed of the client's own and common ones."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedtailor.method import BY_CLASS, Client, Mean, Message, Method, Search, Server, Uploads

EPS = 1e-4  # share of a multiple of the identity in a covariance, and of each class in the prior
LEAST = 3  # samples by which a client estimates the mean of a class

Gaussians = tuple[Tensor, Tensor]  # the mean of each class, and the covariance that they have in common, in float64


class PFedFDA(Method):
    """A shared body under generative heads: linear discriminants of Gaussian features (McLaughlin & Su 2024).

    The features of class c are taken for N(μ_c, Σ), which makes Bayes' rule a linear head: W = Σ⁻¹μ,
    b_c = −½ μ_cᵀΣ⁻¹μ_c + log π_c, with the client's own class frequencies π. A participant trains the body alone, under
    the head of the common μ, Σ. It then estimates both from its samples and uploads β μ̂ + (1 − β) μ, and Σ likewise
    with another β, beside the body. The two β minimise the cross-entropy in a cross-validation over halves of its
    samples. The personal model is the present body under the head of such mixes, estimated anew.

    Limits: `beta=0` predicts with common Gaussians, clients differ by their π alone; `beta=1` with the client's own. A
    class of fewer than 3 samples has the common mean. New clients: the same as all others.

    Deviations: means and covariances are those of the trained body, in evaluation mode; the release's are of the
    features of all batches while it trains. The release estimates the mean of a class from a single sample, as its test
    of the number looks at all classes. Common covariances that noise or a robust rule has made indefinite get
    eigenvalues of 0 in the place of negative ones.
    """

    name: ClassVar[str] = "pfedfda"
    title: ClassVar[str] = "pFedFDA"
    paper: ClassVar[str] = (
        "McLaughlin & Su, Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024"
    )
    shared_part: ClassVar[str] = "the body, and the mean and covariance of the features"
    own_part: ClassVar[str] = "the head, computed from its own and the common Gaussians"

    uploads: ClassVar[Uploads] = {"body": Mean(), "means": Mean(), "covariance": Mean()}
    refuses: ClassVar[Mapping[str, str]] = BY_CLASS

    beta: float | None = Field(
        None, ge=0, le=1, description="share of the client's own Gaussians, β (none: cross-validated)"
    )
    ridge: float = Field(0.1, ge=0, description="what a client adds to the variance of each feature (release: 1)")
    search: ClassVar[Search] = {"ridge": "0.0001..10:log"}

    def start(self, server: Server) -> None:
        shape = server.layout.linear_head(self.title, bias=True)
        server.state["body"] = server.initial[server.body]
        server.state["means"] = torch.rand(shape, generator=server.random, device="cpu").to(server.initial)
        server.state["covariance"] = torch.eye(shape[1], device="cpu").to(server.initial)

    def train(self, client: Client, message: Message) -> Message:
        theta = torch.cat([message["body"], head(client, common(message))])
        theta = client.descend(theta, part=client.body)
        means, covariance = (tensor.to(theta) for tensor in self.adapted(client, theta, message))
        return {"body": theta[client.body], "means": means, "covariance": covariance}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        theta = torch.cat([message["body"], client.initial[client.head]])
        return torch.cat([message["body"], head(client, self.adapted(client, theta, message))])

    def adapted(self, client: Client, theta: Tensor, message: Message) -> Gaussians:
        """Mix the Gaussians of the client's features under this body with the common ones."""
        z, y, shared = client.flat_features(theta).cpu().double(), client.train_data[1].cpu(), common(message)
        beta = self.validated(client, z, y, shared) if self.beta is None else z.new_full((2,), self.beta)
        return mixed(beta, self.estimated(z, y, shared), shared)

    def estimated(self, z: Tensor, y: Tensor, shared: Gaussians) -> Gaussians:
        """Estimate μ̂ and Σ̂ + ridge · I."""
        counts, means = y.bincount(minlength=len(shared[0]))[:, None], shared[0]
        sums = torch.zeros_like(means).index_add_(0, y, z)
        means = torch.where(counts >= LEAST, sums / counts.clamp(min=1), means)
        away = z - means[y]
        return means, away.T @ away / max(1, len(z) - 1) + self.ridge * torch.eye(z.shape[1], device="cpu").to(z)

    def validated(self, client: Client, z: Tensor, y: Tensor, shared: Gaussians) -> Tensor:
        """Find the β of means and covariance by which Gaussians of one half predict the other best."""
        halves = [part for part in in_halves(y, client) if len(part)]
        if len(halves) < 2:  # no class has two samples
            return z.new_zeros(2)
        own = [self.estimated(z[half], y[half], shared) for half in halves]
        beta = z.new_full((2,), 0.5).requires_grad_()
        solver = torch.optim.LBFGS([beta], max_iter=10, tolerance_grad=1e-3, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            solver.zero_grad()
            total = z.new_zeros(())
            for gaussians, other in zip(own, reversed(halves), strict=True):
                W, b = discriminant(mixed(beta.clamp(0, 1), gaussians, shared), prior(client))
                total = total + cross_entropy(z[other] @ W.T + b, y[other])
            total.backward()
            return total

        with torch.enable_grad():
            solver.step(loss)
        return beta.detach().clamp(0, 1)


def common(message: Message) -> Gaussians:
    """Read the common Gaussians, with a covariance that has no negative eigenvalues."""
    covariance = message["covariance"].cpu().double()
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    return message["means"].cpu().double(), vectors * values.clamp(min=0) @ vectors.T


def mixed(beta: Tensor, own: Gaussians, shared: Gaussians) -> Gaussians:
    """Mix β of the own Gaussians with 1 − β of the common ones."""
    means, covariance = (b * one + (1 - b) * other for b, one, other in zip(beta, own, shared, strict=True))
    return means, covariance


def discriminant(gaussians: Gaussians, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the weights and biases of Bayes' rule."""
    means, covariance = gaussians
    size = covariance.diagonal().mean()
    covariance = (1 - EPS) * covariance + EPS * size * torch.eye(len(covariance), device="cpu").to(covariance)
    W = torch.linalg.solve(covariance, means.T).T
    return W, prior.log() - (means * W).sum(1) / 2


def head(client: Client, gaussians: Gaussians) -> Tensor:
    """Compute the client's head from Gaussians of the features."""
    W, b = discriminant(gaussians, prior(client))
    return torch.cat([W.flatten(), b]).to(client.initial)


def prior(client: Client) -> Tensor:
    """Compute the client's class frequencies π, of which none is 0."""
    counts = client.class_counts.cpu().double()
    shares = counts / counts.sum() + EPS
    return shares / shares.sum()


def in_halves(y: Tensor, client: Client) -> tuple[Tensor, Tensor]:
    """Split the samples of every class that has at least two in halves, the same in every round."""
    drawn = torch.randperm(len(y), generator=client.stream("halves", every_round=False), device="cpu")
    of_class = [drawn[y[drawn] == c] for c in y.unique()]
    of_class = [indices for indices in of_class if len(indices) > 1]
    empty = drawn[:0]
    return torch.cat([empty, *(i[::2] for i in of_class)]), torch.cat([empty, *(i[1::2] for i in of_class)])
