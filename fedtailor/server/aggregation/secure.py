"""Secure aggregation at the server: it adds up masked uploads, and learns their sum when enough sites open it.

Masks are whole numbers modulo 2⁶⁴, so the sum has the same bits in any order. A round whose sum is not opened counts
for nobody; it is never opened wrongly: secrets that are put together of shares are compared with what their owner
committed to.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.participation import Participation
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import (
    Agree,
    Masked,
    Message,
    Open,
    Reply,
    Request,
    Secure,
    Shares,
    State,
    as_bytes,
    joined,
    message_bytes,
)
from fedtailor.method import Each, Method, Server, Total, expected_upload, weighted
from fedtailor.privacy.fixed_point import MOST_PARTIES, decoded
from fedtailor.privacy.masks import KEYS, SEED, Words, add_mask, digest_of, is_own, is_pairs, pair_mask, threshold
from fedtailor.privacy.secret_shares import recovered
from fedtailor.server.aggregation import Aggregator

LEAST = 2.0**-10  # the smallest sum of weights that is divided by: below, rounding would be most of the mean
Ask = Callable[[Sequence[Request]], Iterable[Reply]]


class NotOpenedError(Exception):
    """The sum of a round stays closed."""


class SecureAggregator(Aggregator):
    """Adds up one round's masked uploads, and has the sum opened when the round closes."""

    def __init__(
        self, method: Method, server: Server, messages: Mapping[int, Message], privacy: Privacy | None = None
    ) -> None:
        super().__init__(method.uploads, list(messages), server.n_samples, server.layout)
        self._method, self._server, self._messages = method, server, messages
        self._private = privacy is not None and privacy.level == "client"  # then all weigh the same
        self.needs = threshold(len(messages))
        self._given: dict[int, Message] = {}  # the keys of those that trained
        self._summed: State = {}
        self._why = ""

    def put(self, client: int, upload: Message | None) -> dict[int, str]:
        """Take the keys that a client handed out in place of its upload, or None if it failed."""
        try:
            if upload is not None:
                if set(upload) != {"key", "signature", "certificate"} or len(as_bytes(upload["key"])) != KEYS:
                    raise ValueError("no keys")
                self._given[client] = dict(upload)
        except ValueError:
            return {client: "it sent no keys for secure aggregation"}
        return {}

    @property
    def lacking(self) -> str:
        """Say why the round counts for nobody; nothing if it counts."""
        return self._why

    def close(self, ask: Ask, replies: Mapping[int, Reply]) -> None:
        """Go through the steps with those that trained. Who is gone in between gets an error into its reply, unless
        its upload is in the sum already."""
        steps = _Steps(ask, self._server.round, replies)
        try:
            total = self._opened(steps)
            self._summed = self._parts(total)
            self.clients = steps.survivors
        except NotOpenedError as why:
            self._why = str(why)

    def _opened(self, steps: "_Steps") -> Tensor:
        """Take all steps; return the sum without masks."""
        keys = {client: as_bytes(given["key"]) for client, given in sorted(self._given.items())}
        self._enough(keys, "trained")
        shares = steps.answers(Shares, dict.fromkeys(keys, joined({n: self._given[n] for n in keys})))
        sealed = {n: given for n, given in shares.items() if set(given) == {str(other) for other in keys if other != n}}
        steps.left_out(shares.keys() - sealed.keys(), "it sent no shares for secure aggregation")
        self._enough(sealed, "shared their secrets")
        mine = {n: {str(other): sealed[other][str(n)] for other in sealed if other != n} for n in sealed}
        length = sum(tensor.numel() for tensor in self._like().values())
        total, survivors = np.zeros(length, np.uint64), []
        for client, given in steps.answers_as_they_come(Masked, mine):
            y = given.get("masked")
            if y is None or set(given) != {"masked"} or (y.dtype, y.shape) != (torch.int64, (length,)):
                steps.left_out([client], "it sent no masked upload")
                continue
            total += y.numpy().view(np.uint64)
            survivors.append(client)
        survivors.sort()
        self._enough(survivors, "sent their uploads")
        listed = {"survivors": torch.tensor(survivors)}
        steps.survivors = survivors
        signed = steps.answers(Agree, dict.fromkeys(survivors, listed))
        self._enough(signed, "signed for the sum")
        signatures = {str(client): given.get("signature", torch.zeros(0)) for client, given in signed.items()}
        handed = steps.answers(Open, dict.fromkeys(signed, signatures))
        self._enough(handed, "opened the sum")
        self._unmask(total, keys, [*sealed], survivors, handed)
        return torch.from_numpy(total.view(np.int64))

    def _enough(self, clients: Iterable[int], did: str) -> None:
        if (there := len(list(clients))) < self.needs:
            raise NotOpenedError(
                f"as only {there} of {len(self.participants)} sites {did}, and secure aggregation needs {self.needs}"
            )

    def _unmask(
        self,
        total: Words,
        keys: Mapping[int, bytes],
        shared: Sequence[int],
        survivors: Sequence[int],
        given: Mapping[int, Message],
    ) -> None:
        """Take away the own mask of everybody in the sum, and the masks in common with those that are not."""
        digest = digest_of(keys)
        for client in shared:
            there = client in survivors
            shares = {n + 1: _bytes(of[str(client)]) for n, of in given.items() if str(client) in of}
            fits = partial(is_own if there else is_pairs, keys=keys[client])
            seed, wrong = recovered(shares, self.needs, SEED, fits)
            for place in wrong:
                self._server.warn(
                    f"a wrong share of client {place - 1}",
                    f"Round {self._server.round}: client {place - 1} handed out a wrong share of a secret; the sum was "
                    "opened without it.",
                )
            if seed is None:
                raise NotOpenedError(f"as the shares of client {client}'s secret do not fit what it committed to")
            if there:
                add_mask(total, seed, -1)
            else:
                for other in survivors:
                    add_mask(total, pair_mask(seed, keys[other], digest), 1 if client < other else -1)

    # --- from the sum to the means ---

    def _like(self) -> State:
        """Return tensors like those that a client sums, in their order."""
        like = expected_upload(self._method, self._server, min(self.participants))
        zeros = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in like.items()}
        return weighted(self._method, zeros, 1, self.layout)

    def _parts(self, total: Tensor) -> State:
        """Cut the sum into tensors; refuse one whose weights are too small to divide by."""
        like = self._like()
        pieces = decoded(total, len(self.participants)).split([tensor.numel() for tensor in like.values()])
        parts = {name: piece.view(like[name].shape) for name, piece in zip(like, pieces, strict=True)}
        for name in self._means:
            weight = parts[f"{name}/weight"].abs()
            if ((weight > 0) & (weight < LEAST)).any():
                raise NotOpenedError(f"as the weights of {name!r} together are below 2^-10, too small to divide by")
        return parts

    def total(self) -> Total:
        """Close the round: divide the sums by their weights; or, of changes with noise, by the expected number."""
        like = expected_upload(self._method, self._server, min(self.participants))
        if self._private:
            return self._private_total(like)
        means, weights = {}, {}
        for name, how in self._means.items():
            value, weight = self._summed[name], self._summed[f"{name}/weight"]
            spread = self.layout.spread(weight) if weight.dim() else weight
            mean = torch.where(spread != 0, value / spread, torch.zeros_like(value))
            means[name] = mean.to(_kind(like[name]))
            if how.weights not in ("samples", "equal"):
                weights[name] = weight.to(_kind(like[name]))
        return Total(self.clients, self.n_samples[self.clients], means, weights, self._single)

    def _private_total(self, like: Message) -> Total:
        """θ_sent + (Σ_i θ_i − k θ_sent) / M, as `PrivateAggregator` does it with single changes."""
        expected, means = self._server.per_round, {}
        message = self._messages[min(self._messages)]
        for name in self._means:
            value, sent = self._summed[name], self._method.sent(message, name, like[name])
            if sent is None:
                mean = value / expected
            else:
                start = sent.cpu().double()
                mean = start + (value - len(self.clients) * start) / expected
            means[name] = mean.to(_kind(like[name]))
        share = expected / self._server.n_clients
        return Total(self.clients, self.n_samples[self.clients], means, {}, self._single, share)


class _Steps:
    """The steps of a round: what is asked of whom, and who is gone."""

    def __init__(self, ask: Ask, round: int, replies: Mapping[int, Reply]) -> None:
        self._ask, self._round, self._replies = ask, round, replies
        self.survivors: list[int] = []  # in the sum: whether they answer or not, their round counts

    def answers_as_they_come(self, step: type[Secure], messages: Mapping[int, Message]) -> Iterator[tuple[int, State]]:
        """Ask for a step, and yield who answered what."""
        silent = set(messages)
        for reply in self._ask([step(self._round, client, message) for client, message in messages.items()]):
            client = reply.clients[0]
            if client not in silent:
                continue
            silent.remove(client)
            if reply.error:
                self.left_out([client], reply.error)
                continue
            self._replies[client].bytes_up += message_bytes(reply.upload)
            yield client, reply.upload
        self.left_out(silent, "it did not answer")

    def answers(self, step: type[Secure], messages: Mapping[int, Message]) -> dict[int, State]:
        """Ask for a step, and return who answered what, in the order of their numbers."""
        return dict(sorted(self.answers_as_they_come(step, messages)))

    def left_out(self, clients: Iterable[int], why: str) -> None:
        """Write down why clients are not in the sum."""
        for client in clients:
            if client not in self.survivors:
                self._replies[client].error = why


def _bytes(tensor: Tensor) -> bytes:
    try:
        return as_bytes(tensor)
    except ValueError:
        return b""


def _kind(like: Tensor) -> Tensor:
    return like if like.is_floating_point() else like.double()


def check_secure(experiment: Experiment, method: Method, clients: int) -> None:
    """Refuse what cannot be aggregated securely. `clients` is the number of training clients."""
    title = type(method).__name__
    if single := [name for name, how in method.uploads.items() if isinstance(how, Each) and not how.record]:
        raise FedtailorError(
            f"{title} needs every client's own {single[0]}, and secure aggregation shows the server sums alone: take a "
            "method whose uploads are means, like fedavg, or leave --secure out."
        )
    if experiment.attack is not None:
        raise FedtailorError("What hostile clients upload is masked under --secure: leave --attack out.")
    if Rule.parse(experiment.aggregation).kind not in ("mean", "norm-bound"):
        raise FedtailorError(
            f"The rule {experiment.aggregation} compares single uploads, which secure aggregation hides from the "
            "server: take --aggregation mean or norm-bound, or leave --secure out."
        )
    if experiment.privacy is not None and experiment.epsilon != "inf":
        privacy = Privacy.parse(experiment.privacy)
        if privacy.level == "client" and privacy.by == "server":
            raise FedtailorError(
                "The server can clip no upload that it does not see: with --secure, take by=clients, as in --privacy "
                "'client, by=clients'."
            )
    most = Participation.parse(experiment.participation).most_of(clients)
    if not 2 <= most <= MOST_PARTIES:
        raise FedtailorError(
            f"Secure aggregation is for 2 to {MOST_PARTIES:,} clients in a round, and {most} take part: change "
            "--participation or --clients."
        )
