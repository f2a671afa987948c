"""PGFed: each client's own global objective, by first-order estimates of the others' risks."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.method import Client, Each, Mean, Message, Method, Search, Server, State, Total, Uploads


class PGFed(Method):
    """Each client minimises f_i(θ) + μ Σ_j α_ij f_j(θ) with learned α_ij (Luo et al. 2023).

    The others' risks are first-order estimates from the last round's participants S_{t−1} (Eq. 7), so a round costs
    five vectors a participant. Names and line numbers are Algorithm 1's: g̃ is `g_tilde`, ḡ is `g_bar`, g⁽¹⁾ is `g1`.
    The personal model is the client's own last trained vector.

    A linear estimate has no lower bound. With a large μ, α_ij and g̃ can feed each other until θ is infinite; the server
    sees both and warns. Hence the small default of μ.

    New clients: the global model. Limits: `mu=0` is FedAvg's training; round 1 is always FedAvg's. Deviation: line 10
    is clamped to α_ij ≥ 0, which the paper demands (Eq. 5) and Algorithm 1 does not ensure.
    """

    name: ClassVar[str] = "pgfed"
    corrects: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Luo et al., PGFed: Personalize Each Client's Global Objective for Federated Learning, ICCV 2023"
    )
    shared_part: ClassVar[str] = "the global model and sums of gradients"
    own_part: ClassVar[str] = "the last trained model"
    uploads: ClassVar[Uploads] = {"theta": Mean("samples"), "alpha": Each(), "gradient": Each(), "g1": Each()}
    keeps_model: ClassVar[bool] = True

    mu: float = Field(0.01, ge=0, description="weight of the others' risks, μ (release: 0.1)")
    alpha_lr: float = Field(0.01, ge=0, description="learning rate of the α_ij, η₂")
    alpha_max: float | None = Field(None, ge=0, description="ceiling of the α_ij; none by default, as in the paper")
    search: ClassVar[Search] = {"mu": "0.001..0.1:log", "alpha_lr": "0.001..0.1:log"}

    def start(self, server: Server) -> None:
        super().start(server)
        server.state["A"] = server.pairs(1 / server.per_round)  # lines 1-2
        server.state["last"] = torch.zeros(0, dtype=torch.int64, device=server.initial.device)  # S_{t−1}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        state, last = server.state, server.state["last"]
        if not len(last):
            return super().send_all(server)  # line 8
        g_bar = self.mu * state["gradients"].mean(0)  # line 11
        common = {"theta": state["theta"], "g_bar": g_bar, "g1": state["g1"]}
        g_tilde = self.g_tilde(server, server.participants)  # line 10
        self.watch(server, g_tilde)
        rows = zip(server.participants, g_tilde, strict=True)
        return {i: {**common, "g_tilde": row, "alpha": state["A"][i, last]} for i, row in rows}

    def g_tilde(self, server: Server, clients: list[int]) -> Tensor:
        """Compute line 10 for all these clients: μ Σ_j α_ij ∇f_j(θ_j) over j in S_{t−1}, as the rows of a matrix."""
        alpha = server.state["A"][clients][:, server.state["last"]]
        return self.mu * alpha @ server.state["gradients"]

    def watch(self, server: Server, g_tilde: Tensor) -> None:
        """Warn if an auxiliary gradient is longer than the clients' own: with α_ij = 1/M it has at most μ times their
        length, and a linear estimate that α makes ever more of has no lower bound."""
        lengths, own = g_tilde.norm(dim=1), server.state["gradients"].norm(dim=1).mean()
        if not (lengths <= (1 + self.mu) * own).all():  # nor if it is not a number
            server.warn(
                "divergence",
                f"Round {server.round}: PGFed's auxiliary gradient is {lengths.max() / own:.3g} times as long as the "
                f"clients' own, and α_ij has grown from {1 / server.per_round:.3g} to {server.state['A'].max():.3g}. "
                "They feed each other, and the models may become infinite: choose a smaller mu.",
            )

    def train(self, client: Client, message: Message) -> Message:
        theta, alpha = self.update(client, message)
        client.state["theta"] = theta
        loss, gradient = client.loss_and_gradient(theta)
        g1 = self.mu * (loss - gradient @ theta)  # line 13
        return {"theta": theta, "alpha": alpha, "gradient": gradient, "g1": g1}  # line 14

    def update(self, client: Client, message: Message) -> tuple[Tensor, Tensor]:
        """Train as in ClientUpdate, lines 1-12; return θ_i and the new α_ij."""
        if "g_tilde" not in message:
            return client.descend(message["theta"]), client.initial.new_empty(0)  # line 2
        alpha = message["alpha"].clone()

        def step(theta: Tensor) -> None:  # after each step of line 8
            moved = alpha - self.alpha_lr * (message["g1"] + self.g2(message, theta))  # line 10
            alpha.copy_(moved.clamp(0, self.alpha_max))

        correction = self.auxiliary_gradient(client, message["g_tilde"])
        return client.descend(message["theta"], correction=correction, each_step=step), alpha  # lines 4, 7-8

    def auxiliary_gradient(self, client: Client, g_tilde: Tensor) -> Tensor:
        """Return the auxiliary gradient that the client trains with (line 5)."""
        return g_tilde

    def g2(self, message: Message, theta: Tensor) -> Tensor:
        """Compute g⁽²⁾ (line 9)."""
        return message["g_bar"] @ theta

    def upload_like(self, server: Server, client: int) -> Message:
        return {"alpha": server.state["A"][client, server.state["last"]], "g1": server.initial[0]}

    def receive(self, server: Server, total: Total) -> None:
        A, last = server.state["A"].clone(), server.state["last"]
        for i, alpha in total.each("alpha").items():
            A[i, last] = alpha  # line 16
        # Line 17: θ_glob; and what the next round needs.
        server.state |= {**self.gradients(server, total), "A": A, "last": total.index, "theta": total["theta"]}

    def gradients(self, server: Server, total: Total) -> State:
        """Collect ∇f_i and g⁽¹⁾_i of the round's clients for the next round (line 16)."""
        return {"gradients": total.rows("gradient"), "g1": total.rows("g1")}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else message["theta"]

    def observe(self, server: Server) -> Message:
        """Record A, its change since the start, and two correlations (Figure 3).

        These are of the clients' training samples with the change of A's columns (help given) and rows (help needed).
        """
        change = server.state["A"] - 1 / server.per_round
        rows = torch.stack([server.n_samples.to(change), change.mean(0), change.mean(1)])
        rows = normalize(rows - rows.mean(1, keepdim=True))
        return {"A": server.state["A"], "change": change, "correlation": rows[1:] @ rows[0]}
