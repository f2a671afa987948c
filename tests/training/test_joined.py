"""Functions of several clients as one: what comes of each is what comes of it alone, or they are not joined."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.method import Method
from fedtailor.training.joined import Joined, NotAlike

CLIENTS, WIDTH = 3, 5
VECTORS = torch.rand(CLIENTS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
SEEN: list[Tensor] = []
Function = Callable[[Tensor], Any]


def own(client: int) -> Tensor:
    """A tensor of each client's own, always the same."""
    return torch.rand(WIDTH, generator=torch.Generator().manual_seed(client)).double()


class Pulled(Method):
    """A method with a number, and a function that uses it."""

    strength: float = 0.5

    def pull(self, vector: Tensor, target: Tensor) -> Tensor:
        return self.strength * (vector - target)


def joined(functions: Sequence[Function], memory: Sequence[Tensor] = ()) -> Joined | None:
    return Joined.that_works([(function,) for function in functions], VECTORS, memory)


def closure(client: int) -> Function:
    w = own(client)
    return lambda vector: 0.5 * (vector - w)


def of_method(client: int, method: Method = Pulled()) -> Function:  # noqa: B008
    w = own(client)
    return lambda vector: method.pull(vector, w)  # type: ignore[attr-defined]


def of_message(client: int) -> Function:
    message, pair = {"g": own(client), "w": own(10 + client)}, (own(20 + client), 3)

    def inner(vector: Tensor) -> Tensor:
        return message["g"] @ vector * message["w"]

    return lambda vector: inner(vector) + pair[0] * pair[1]


def with_default(client: int) -> Function:
    def function(vector: Tensor, w: Tensor = own(client), *, share: Tensor = own(10 + client)) -> Tensor:  # noqa: B008
        return share * vector + w

    return function


def bound(client: int) -> Function:
    return own(client).add


def itself(_: int) -> Function:
    return lambda vector: vector


ALIKE = [closure, of_method, of_message, with_default, itself]


@pytest.mark.parametrize("make", ALIKE)
def test_what_comes_of_each_is_what_comes_of_it_alone(make: Callable[[int], Function]) -> None:
    functions = [make(client) for client in range(CLIENTS)]
    together = joined(functions)
    assert together is not None
    for k in (CLIENTS, 2):  # of the first clients too
        expected = torch.stack([function(vector) for function, vector in zip(functions, VECTORS[:k], strict=False)])
        found = together.call(0, VECTORS[:k])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert found.data_ptr() != VECTORS.data_ptr()  # which the caller changes


def test_what_functions_write_into_tensors_is_written_into_each_clients_own() -> None:
    """Two functions that share a tensor; the last client takes one step less. Trying them leaves nothing behind."""

    def made(client: int) -> tuple[Tensor, tuple[Function, Function]]:
        alpha, w = own(client), own(10 + client)

        def step(vector: Tensor) -> None:
            alpha.sub_(0.1 * (w @ vector))

        return alpha, (lambda vector: alpha * vector, step)

    alone, together = ([made(client) for client in range(CLIENTS)] for _ in range(2))
    functions = Joined.that_works([of for _, of in together], VECTORS, [])
    assert functions is not None
    for k in (CLIENTS, 2):
        expected = [alone[client][1][0](VECTORS[client]) for client in range(k)]
        torch.testing.assert_close(functions.call(0, VECTORS[:k]), torch.stack(expected))
        for client in range(k):
            alone[client][1][1](VECTORS[client])
        assert functions.call(1, VECTORS[:k]) == ()
    assert all(torch.equal(alpha, own(client)) for client, (alpha, _) in enumerate(together))
    functions.give_back()
    for (one, _), (other, _) in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=0)


def into_a_list(_: int) -> Function:
    seen: list[Tensor] = []
    return lambda vector: (seen.append(vector), vector)[1]


def into_a_global_list(_: int) -> Function:
    return lambda vector: (SEEN.append(vector), vector)[1]


def rebinds(client: int) -> Function:
    mean = own(client)

    def function(vector: Tensor) -> Tensor:
        nonlocal mean
        mean = mean.lerp(vector, 0.5)
        return mean

    return function


def rebinds_inside(client: int) -> Function:
    outer = rebinds(client)
    return lambda vector: 2 * outer(vector)


def draws(client: int) -> Function:
    stream = torch.Generator().manual_seed(client)
    return lambda vector: vector * torch.rand(WIDTH, generator=stream)


def another_number(client: int) -> Function:
    return lambda vector: vector * client


def another_shape(client: int) -> Function:
    w = torch.ones(1 + client)
    return lambda vector: vector * w.sum()


def another_function(client: int) -> Function:
    return closure(client) if client else with_default(client)


def with_gradients(client: int) -> Function:
    w = own(client).requires_grad_()
    return lambda vector: vector * w.detach()


def two_views_of_one(client: int) -> Function:
    w = own(client)
    first = w[:1]
    return lambda vector: vector * w * first


def into_a_dictionary(client: int) -> Function:
    message = {"w": own(client)}
    return lambda vector: message.setdefault("v", vector) * message["w"]


def by_a_number(client: int) -> Function:
    w = own(client)
    return lambda vector: vector if float(w.sum()) > 0 else w


def another_method(client: int) -> Function:
    return of_method(client, Pulled(strength=0.1 * (1 + client)))


@pytest.mark.parametrize(
    "make",
    [
        into_a_list, into_a_global_list, rebinds, rebinds_inside, draws, another_number, another_shape,
        another_function, with_gradients, two_views_of_one, into_a_dictionary, by_a_number, bound, another_method,
    ],
)  # fmt: skip
def test_functions_that_differ_in_more_are_not_joined(make: Callable[[int], Function]) -> None:
    SEEN.clear()
    with suppress(NotAlike):
        assert joined([make(client) for client in range(CLIENTS)]) is None
    assert not SEEN


def test_tensors_that_change_meanwhile_are_not_copied() -> None:
    vectors = VECTORS.clone()

    def of(client: int) -> Function:
        row = vectors[client]
        return lambda vector: vector - row

    with pytest.raises(NotAlike):
        joined([of(client) for client in range(CLIENTS)], [vectors])


def test_partial_functions_and_missing_ones_are_not_joined() -> None:
    with pytest.raises(NotAlike):
        joined([partial(torch.mul, own(client)) for client in range(CLIENTS)])
    with pytest.raises(NotAlike):
        Joined([(None,), (closure(1),)], [])
