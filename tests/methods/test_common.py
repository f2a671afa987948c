"""The common suite: what every method in the catalogue must do, now and later."""

import json
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.client.sites import Sites
from fedtailor.messages import Reply, Request, Train, copied
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.testing import SMALL, parametrize_with_checks
from tests.helpers import digits, make_simulation

every_method = pytest.mark.parametrize("method", list(CATALOGUE))


@parametrize_with_checks(list(CATALOGUE.values()))
def test_common_suite(method: ft.Method, check: Callable[[ft.Method], None]) -> None:
    check(method)


@every_method
def test_every_method_says_what_it_is(method: str) -> None:
    kind = type(find_method(method))
    assert (kind.__doc__ or "").split("\n")[0].endswith((".", ")."))
    assert kind.paper or method == "local"
    assert "new clients" in (kind.__doc__ or "").lower()  # what one gets that never took part
    json.dumps(kind().model_dump())


# --- what leaves a client, and what a client needs to predict ---


@every_method
def test_an_upload_that_is_not_declared_is_refused(method: str) -> None:
    kind = CATALOGUE[method]

    class Whispers(kind):  # type: ignore[valid-type, misc]
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {**super().train(client, message), "first sample": client.train_data[0][0]}

    sentence = "its upload has 'first sample', which Whispers does not declare in `uploads`"
    with pytest.raises(ft.FedtailorError, match=rf"^Whispers, round 1: clients? .+ failed: .*{sentence}"):
        ft.run(Whispers(), engine="in-process", **SMALL)


@pytest.mark.parametrize("method", [name for name, kind in CATALOGUE.items() if kind.uploads])
def test_an_upload_that_lacks_something_is_refused(method: str) -> None:
    forgotten: list[str] = []

    class Forgets(CATALOGUE[method]):  # type: ignore[misc, name-defined]
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {name: tensor for name, tensor in super().train(client, message).items() if name not in forgotten}

    for name in sorted(find_method(method).uploaded):
        forgotten[:] = [name]
        sentence = f"its upload lacks '{name}', which Forgets declares in `uploads`"
        with pytest.raises(ft.FedtailorError, match=rf"^Forgets, round 1: clients? .+ failed: .*{sentence}"):
            ft.run(Forgets(), engine="in-process", **SMALL)


@pytest.mark.parametrize("change", ["more", "less"])
def test_the_server_refuses_such_uploads_too(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes nothing that the method does not declare, whatever a site sends."""
    replies: Callable[[Sites, Request], list[Reply]] = Sites.replies

    def changed(sites: Sites, request: Request) -> list[Reply]:
        (reply,) = replies(sites, request)
        if isinstance(request, Train) and request.client == 1:
            reply.upload = {**reply.upload, "secret": torch.ones(2)} if change == "more" else {}
        return [reply]

    monkeypatch.setattr(Sites, "replies", changed)
    sentence = (
        "has 'secret', which FedAvg does not declare" if change == "more" else "lacks 'theta', which FedAvg declares"
    )
    with pytest.warns(ft.ClientFailure, match=f"client 1 left out: its upload {sentence} in `uploads`"):
        result = ft.run("fedavg", data=digits([30, 30, 30]), model="mlp:16", rounds=1, engine="in-process")
    assert result.rounds[0].failed == [1]


class Unreadable(dict[str, Tensor]):
    """A broadcast that nobody may look at."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("the broadcast was read")

    __getitem__ = __contains__ = __iter__ = __len__ = __bool__ = __or__ = __ror__ = _refuse  # type: ignore[assignment]
    get = keys = items = values = copy = _refuse  # type: ignore[assignment]


@every_method
def test_a_method_that_keeps_the_model_never_reads_the_broadcast_once_it_has_trained(method: str) -> None:
    """Then, and where there is no broadcast, a client's model counts until it trains again. Any other method does read
    it: one that does not should say so."""
    run = make_simulation(method, **{**SMALL, "participation": "all"})
    run.round(1)
    run.round(2)
    kind, broadcast = run.terms.method, run.terms.method.broadcast(run.server)
    for client in range(6):
        at_work = run.sites.site(client).client(2, copied(run.state_of(client)))
        if kind.keeps_model or not broadcast:
            assert torch.equal(kind.personal_model(at_work, Unreadable()), run.personal_model(client))
        else:
            with pytest.raises(AssertionError, match="the broadcast was read"):
                kind.personal_model(at_work, Unreadable())
