"""Secure aggregation between sites in memory: the exact sum of those who are there, or nothing; and what is refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.client.answers import Answering
from fedtailor.client.secure_party import Party, pinned
from fedtailor.engines.runs import load
from fedtailor.messages import Agree, Masked, Message, Open, Request, Shares, State, as_bytes, as_tensor, joined
from fedtailor.messages.letters import FaultError, Letter, read_letter
from fedtailor.method import Each, Mean, Method, Total
from fedtailor.methods import all_methods
from fedtailor.privacy.fixed_point import resolution
from fedtailor.privacy.masks import digest_of, is_own, is_pairs, threshold
from fedtailor.privacy.secret_shares import BYTES, recovered
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.aggregation.secure import SecureAggregator
from fedtailor.sites.identity import Certified, Opened
from tests.sites.parts import Federation, Recorded, heard, same_server, samples
from tests.sites.secure_sums import certificate, on_the_way, watched, write_kit

WITH_MEANS = [name for name, method in all_methods().items() if method.means]
SINGLY = {n for n, m in all_methods().items() if any(isinstance(h, Each) and not h.record for h in m.uploads.values())}
STEPS = ("train", "shares", "masked", "agree", "open")
SETTINGS: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch": 7, "lr": 0.05, "seed": 1, "model": "mlp:4"}


def run(method: str = "fedavg", clients: int = 4, **more: Any) -> ft.RunResult:
    return ft.run(method, data=samples(5, clients), **{**SETTINGS, "secure": True, **more})


# --- the same as without ---


def bound(name: str, total: Total, uploads: dict[int, Message], method: Method, plain: Total, called: int) -> Tensor:
    """The stated error of a mean: S 2^-(b+1) (1 + |mean|) / W, and the last bit of its type."""
    how, mean = method.uploads[name], plain[name].double()
    assert isinstance(how, Mean)
    weights = {"samples": total.n_samples.sum().double(), "equal": torch.tensor(float(len(uploads)))}
    W = weights[how.weights] if how.weights in weights else plain.weight(name).double()
    W = torch.where(W == 0, 1.0, W)
    W = W if W.dim() == 0 or W.shape[-1] in (1, mean.shape[-1]) else W.amin()
    step = called * resolution(called) / 2 * (1 + mean.abs()) / W
    return step + mean.abs() * torch.finfo(total[name].dtype).eps


@pytest.mark.parametrize("method", sorted(set(WITH_MEANS) - SINGLY))
def test_every_method_with_means_has_the_plain_means_and_no_upload_reaches_the_server(method: str) -> None:
    """Each round's means against those of the plain aggregator, from the uploads that were held back; and all bytes."""
    uploads: dict[int, Message] = {}
    held, total, compared = Answering._held, SecureAggregator.total, []

    def holding(self: Answering, party: Party, round: int, upload: State) -> State:
        uploads[self.number] = {name: tensor.clone() for name, tensor in upload.items()}
        return held(self, party, round, upload)

    def totalling(self: SecureAggregator) -> Total:
        found = total(self)
        plain = Aggregator(self.uploads, self.participants, self.n_samples, self.layout)
        for client in self.participants:
            given = {n: x.double() if x.is_floating_point() else x for n, x in uploads[client].items()}
            records = {n: torch.zeros(()) for n in self._method.recorded}
            plain.put(client, {**given, **records})
        exact = plain.total()
        for name in self._method.means:
            error = (found[name].double() - exact[name].double()).abs()
            assert bool((error <= bound(name, found, uploads, self._method, exact, len(self.participants))).all()), name
            compared.append(float(error.max()))
        return found

    with (
        patch.object(Answering, "_held", holding),
        patch.object(SecureAggregator, "total", totalling),
        on_the_way(lambda name, kind, round, letter, answer: answer()) as reached,
    ):
        run(method, 3, model="mlp:8" if method != "fedbn" else "mlp", rounds=2)
    assert compared
    assert seen(uploads, b"".join(reached)) == []


def seen(uploads: dict[int, Message], content: bytes) -> list[str]:
    """Find pieces of uploads among bytes: four numbers of a tensor that follow each other, or a single one in eight
    bytes; as they are, and as whole numbers under any scale that could be theirs."""
    found = []
    for client, upload in uploads.items():
        for name, tensor in upload.items():
            flat = tensor.flatten()
            for first in range(0, len(flat) - 3, max(1, len(flat) // 50)):
                piece = flat[first : first + 4]
                if (piece != 0).all() and len(piece.unique()) == 4:
                    forms = [piece, piece.double(), (piece.double() * 2.0**32).round().long()]
                    if any(form.numpy().tobytes() in content for form in forms):
                        found.append(f"{client} {name}")
    return found


def test_the_search_finds_uploads_where_they_are() -> None:
    """A run without secure aggregation: the test above would see what it looks for."""
    uploads: dict[int, Message] = {}
    with on_the_way(lambda name, kind, round, letter, answer: answer()) as reached:
        run("fedavg", 3, secure=False, engine="sites-in-memory", rounds=1, evaluate_every=0)
    for number, content in enumerate(reached):
        uploads[number] = read_letter(content).tensors
    assert seen(uploads, b"".join(reached))


def test_noise_of_clients_is_in_the_sum_and_epsilon_holds_against_the_server() -> None:
    pytest.importorskip("dp_accounting")
    privacy = "client, clip=0.5, noise=1.0, by=clients"
    plain = run(privacy=privacy, secure=False, engine="sites-in-memory", participation=3)
    masked = run(privacy=privacy, participation=3)
    theta = [result.server_state["theta"] for result in (plain, masked)]
    assert float((theta[0] - theta[1]).abs().max()) < 1e-5
    assert plain.epsilon == masked.epsilon
    assert "and from the server" in masked.privacy_in_words
    assert "not from the server" in plain.privacy_in_words


def test_a_norm_bound_is_kept_by_each_site_itself() -> None:
    """As the server bounds it in a plain run, within rounding: a site that does not keep to it is not seen."""
    plain = run(aggregation="norm-bound:0.01", secure=False, engine="sites-in-memory", rounds=1)
    masked = run(aggregation="norm-bound:0.01", rounds=1)
    free = run(rounds=1)
    theta = [result.server_state["theta"] for result in (plain, masked, free)]
    assert float((theta[0] - theta[1]).abs().max()) < 1e-6
    assert float((theta[0] - theta[2]).abs().max()) > 1e-3


def test_what_does_not_fit_is_named_and_its_client_left_out() -> None:
    train = Answering._held

    def huge(self: Answering, party: Party, round: int, upload: State) -> State:
        factor = 1e12 if self.number == 1 else 1.0
        return train(self, party, round, {name: x * factor for name, x in upload.items()})

    with patch.object(Answering, "_held", huge), watched() as sums, heard() as said:
        run(rounds=1)
    assert "client 1 left out: a number of its upload does not fit into secure aggregation (theta)" in said[0]
    assert sums.opened == [(1, [0, 2, 3])]


# --- who is gone ---


@pytest.mark.parametrize("lost", ["letter", "answer"])
@pytest.mark.parametrize("step", STEPS)
def test_a_site_that_is_gone_at_any_step_leaves_the_exact_sum_of_the_others(step: str, lost: str) -> None:
    def gone(name: str, kind: str, round: int, letter: bytes, answer: Callable[[], bytes]) -> bytes | str:
        if (name, kind, round) != ("2", step, 1):
            return answer()
        return "it did not answer" if lost == "letter" or answer() else ""

    with watched() as sums, on_the_way(gone), heard():
        result = run(method="scaffold")
    there = [0, 1, 2, 3] if step in ("agree", "open") else [0, 1, 3]
    assert sums.opened == [(1, there), (2, [0, 1, 2, 3])]
    assert result.rounds[0].failed == sorted({0, 1, 2, 3} - set(there))


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_nothing_is_opened_and_nobody_s_state_changes(step: str) -> None:
    def gone(name: str, kind: str, round: int, letter: bytes, answer: Callable[[], bytes]) -> bytes | str:
        return "it did not answer" if (kind, round) == (step, 1) and name in ("1", "2") else answer()

    before = run(method="scaffold", rounds=1, clients=4)
    with watched() as sums, on_the_way(gone), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = run(method="scaffold")
    assert any("Round 1 changes nothing, as only 2 of 4 sites" in str(each.message) for each in said)
    assert [round for round, _ in sums.closed] == [1]
    assert sums.opened == [(2, [0, 1, 2, 3])]
    assert set(result.simulation.loop.versions.values()) == {2}
    assert not torch.equal(result.server_state["theta"], before.server_state["theta"])


# --- sites that lie ---


def lying(step: str, liars: tuple[str, ...], change: Callable[[State], State]) -> Any:
    def way(name: str, kind: str, round: int, letter: bytes, answer: Callable[[], bytes]) -> bytes | str:
        honest = answer()
        if kind != step or name not in liars:
            return honest
        given = read_letter(honest)
        return Letter(given.kind, given.header, change(dict(given.tensors))).pack()

    return on_the_way(way)


def wrong_shares(given: State) -> State:
    return {name: tensor.roll(1) for name, tensor in given.items()}


def test_a_wrong_share_is_found_and_its_site_named() -> None:
    with watched() as sums, lying("open", ("1",), wrong_shares), pytest.warns(UserWarning, match="client 1 handed out"):
        run(rounds=1)
    assert sums.opened == [(1, [0, 1, 2, 3])]


def test_too_many_wrong_shares_spoil_the_round_loudly() -> None:
    words = "do not fit what it committed to"
    with watched() as sums, lying("open", ("0", "1"), wrong_shares), pytest.warns(UserWarning, match=words):
        run(rounds=1)
    assert [round for round, _ in sums.closed] == [1]


@pytest.mark.parametrize(("step", "change"), [
    ("train", lambda given: {**given, "theta": torch.zeros(3)}),
    ("train", lambda given: {**given, "key": as_tensor(b"short")}),
    ("shares", lambda given: dict(list(given.items())[1:])),
    ("shares", lambda given: {**given, "7": as_tensor(b"x")}),
    ("masked", lambda given: {"masked": given["masked"][1:]}),
    ("masked", lambda given: {"masked": given["masked"].double()}),
    ("masked", lambda given: {**given, "theta": torch.zeros(3)}),
])  # fmt: skip
def test_what_is_not_of_the_protocol_leaves_its_site_out(step: str, change: Callable[[State], State]) -> None:
    with watched() as sums, lying(step, ("1",), change), heard() as said:
        run(rounds=1)
    assert "client 1 left out: it sent no" in said[0]
    assert sums.opened == [(1, [0, 2, 3])]


# --- servers that lie ---


NAMES = ("a", "b", "c", "d")
VALUES = [torch.arange(5) * 10**number for number in range(4)]


class Trial:
    """Four sites, and a server that is played by the test: `keys` has what each handed out."""

    def __init__(self, opened: list[dict[int, str]] | None = None, known: int = 4) -> None:
        identities, memory = pinned(NAMES), opened or [{} for _ in NAMES]
        self.parties = [
            Party(
                "run", NAMES, n, identities[name], lambda round, n=n: [*range(max(known, n + 1))], memory[n].setdefault
            )
            for n, name in enumerate(NAMES)
        ]
        self.given = [party.begin(1, VALUES[n]) for n, party in enumerate(self.parties)]
        self.keys = {n: as_bytes(given["key"]) for n, given in enumerate(self.given)}

    def ask(self, number: int, step: type[Request], message: Message, round: int = 1) -> State:
        return self.parties[number].answer(step(round, number, message))

    def share(self, number: int, **others: State) -> State:
        return self.ask(number, Shares, joined({n: others.get(f"of{n}", given) for n, given in enumerate(self.given)}))

    def masked(self, there: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Take the steps up to the masked uploads."""
        shares = {n: self.share(n) for n in there}
        self.y = {n: self.ask(n, Masked, {str(m): shares[m][str(n)] for m in there if m != n}) for n in there}

    def signed(self, number: int, survivors: list[int]) -> Tensor:
        return self.ask(number, Agree, {"survivors": torch.tensor(survivors)})["signature"]


def refused(kind: str = "refused", words: str = "") -> Any:
    return pytest.raises(FaultError, match=words)


def test_keys_of_the_server_in_place_of_a_site_s_are_refused() -> None:
    """The server cannot sit in between: it has no site's signature for keys of its own."""
    trial, others = Trial(), Trial()
    with refused(words="The keys of b are not signed by it"):
        trial.share(0, of1=others.given[1])
    trial = Trial()
    with refused(words="The keys of b are not signed by it"):
        trial.share(0, of1={**trial.given[1], "key": trial.given[2]["key"]})
    trial = Trial()
    with refused(words="The keys of b are not signed by it"):  # a's own, under another name
        trial.share(0, of1=trial.given[0])


def test_keys_of_another_round_are_refused() -> None:
    trial = Trial()
    again = trial.parties[1].begin(2, VALUES[1])
    with refused(words="The keys of b are not signed by it"):
        trial.share(0, of1=again)


def test_sums_of_few_or_of_strangers_are_refused() -> None:
    with refused(words=r"the sum of 2 sites, fewer than 3"):
        trial = Trial()
        trial.ask(0, Shares, joined({n: trial.given[n] for n in (0, 1)}))
    with refused(words=r"not those that take part"):
        trial = Trial(known=3)
        trial.share(0)
    with refused(words=r"the sum of 2 sites, fewer than 3"):
        trial = Trial()
        shares = {n: trial.share(n) for n in range(4)}
        trial.ask(0, Masked, {"1": shares[1]["0"]})
    with refused(words=r"the sum of 2 sites, fewer than 3"):
        trial = Trial()
        trial.masked()
        trial.signed(0, [0, 1])
    with refused(words="does not take part"):
        Party("run", NAMES, 3, pinned(NAMES)["d"], lambda round: [0, 1, 2]).begin(1, VALUES[3])


def test_steps_out_of_turn_and_replays_are_refused_and_end_the_session() -> None:
    for step in (Masked, Agree, Open):
        trial = Trial()
        with refused(words="out of turn"):
            trial.ask(0, step, {})
        with refused(words="not open here"):
            trial.share(0)
    trial = Trial()
    trial.share(0)
    with refused(words="out of turn"):
        trial.share(0)
    trial = Trial()
    with refused(words="not open here"):
        trial.ask(0, Shares, joined(dict(enumerate(trial.given))), round=2)


def test_both_kinds_of_shares_of_a_site_are_never_handed_out() -> None:
    """One list is signed, one list is opened, once; shares are of the one kind or the other by that list."""
    trial = Trial()
    trial.masked()
    signatures = {str(n): trial.signed(n, [0, 1, 2]) for n in range(3)}
    handed = {n: trial.ask(n, Open, signatures) for n in range(3)}
    for n in range(3):
        with refused(words="not open here"):
            trial.ask(n, Open, signatures)
        with refused(words="not open here"):
            trial.signed(n, [0, 1, 2, 3])
    for owner in range(4):
        shares = {n + 1: as_bytes(handed[n][str(owner)]) for n in range(3)}
        assert all(len(share) == BYTES for share in shares.values())
        own = recovered(shares, 3, 32, lambda seed, o=owner: is_own(seed, trial.keys[o]))[0]  # type: ignore[misc]
        pairs = recovered(shares, 3, 32, lambda seed, o=owner: is_pairs(seed, trial.keys[o]))[0]  # type: ignore[misc]
        assert (own is None, pairs is None) == ((False, True) if owner < 3 else (True, False))


def test_two_lists_cannot_both_be_opened() -> None:
    """The server shows two sites one list and two another: neither gets the signatures that it needs."""
    trial = Trial()
    trial.masked()
    one = {str(n): trial.signed(n, [0, 1, 2, 3]) for n in (0, 1)}
    other = {str(n): trial.signed(n, [1, 2, 3]) for n in (2, 3)}
    for number in range(4):
        with refused(words="Only 2 sites signed for this sum" if number < 3 else "Only 2 sites signed"):
            trial.ask(number, Open, {**one, **other})


def test_a_round_that_is_done_again_is_opened_for_the_same_sites_only() -> None:
    """The difference of the sums of two such rounds would be an upload."""
    memory: list[dict[int, str]] = [{} for _ in NAMES]
    for survivors, allowed in (([0, 1, 2, 3], True), ([0, 1, 2], False), ([0, 1, 2, 3], True)):
        trial = Trial(memory)
        trial.masked()
        if allowed:
            trial.signed(0, survivors)
        else:
            with refused(words="was opened for other sites before"):
                trial.signed(0, survivors)


def test_different_keys_for_different_sites_have_nothing_in_common() -> None:
    """The server leaves d out for a alone: what the others sign is not what a would open."""
    trial = Trial()
    assert digest_of(trial.keys) != digest_of({n: trial.keys[n] for n in range(3)})
    shares = {0: trial.ask(0, Shares, joined({n: trial.given[n] for n in range(3)}))}
    shares |= {n: trial.share(n) for n in (1, 2, 3)}
    for n in range(3):
        trial.ask(n, Masked, {str(m): shares[m][str(n)] for m in range(3) if m != n})
    signatures = {str(n): trial.signed(n, [0, 1, 2]) for n in range(3)}
    with refused(words="Only 1 sites signed"):
        trial.ask(0, Open, signatures)


def test_what_leaves_is_spread_over_all_whole_numbers() -> None:
    """A chi-squared test of the top byte, of an upload of zeros."""
    parties = [Party("r", NAMES, n, i, lambda round: [0, 1, 2, 3]) for n, i in enumerate(pinned(NAMES).values())]
    given = {n: party.begin(1, torch.zeros(25_600, dtype=torch.int64)) for n, party in enumerate(parties)}
    shares = {n: party.answer(Shares(1, n, joined(given))) for n, party in enumerate(parties)}
    y = parties[0].answer(Masked(1, 0, {str(m): shares[m]["0"] for m in (1, 2, 3)}))["masked"]
    counts = np.bincount(y.numpy().view(np.uint8)[7::8], minlength=256)
    assert ((counts - 100) ** 2 / 100).sum() < 400  # 255 on average, deviation 23


# --- what is refused before a run ---


@pytest.mark.parametrize("method", sorted(SINGLY))
def test_methods_that_need_single_uploads_are_refused(method: str) -> None:
    with pytest.raises(FedtailorError, match=r"needs every client's own .* secure aggregation shows the server sums"):
        run(method)


@pytest.mark.parametrize(("settings", "words"), [
    ({"aggregation": "median"}, "The rule median compares single uploads"),
    ({"aggregation": "krum:1"}, "compares single uploads"),
    ({"privacy": "client, noise=1"}, "The server can clip no upload that it does not see"),
    ({"attack": "sign-flip"}, "leave --attack out"),
    ({"engine": "processes"}, "leave --engine processes out"),
    ({"debug": True}, "leave --debug out"),
    ({"participation": 1}, "for 2 to 1,000 clients in a round, and 1 take part"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_refused_in_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        run(**settings)


# --- real sites, with certificates ---


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    made = Federation(tmp_path, method="ditto", secure=True, model="mlp:4")
    for name in made.data:
        write_kit(tmp_path / name, name)
    return made


def test_sites_with_certificates_have_the_bits_of_a_simulation(federation: Federation) -> None:
    with watched() as sums:
        real = federation.run()
    assert [clients for _, clients in sums.opened] == [[0, 1, 2]] * 3
    simulated = federation.simulated(engine="sites-in-memory")
    assert same_server(real.simulation, simulated.simulation)
    assert same_server(load(federation.root / "run").simulation, simulated.simulation)  # to look at


@pytest.mark.parametrize(("certified", "refusing"), [
    (lambda: certificate("south", "other root"), "the certificate of another root"),
    (lambda: certificate("south", days=-1), "an expired one"),
    (lambda: certificate("north", key="south"), "another site's name"),
])  # fmt: skip
def test_a_certificate_that_the_plan_does_not_pin_counts_for_nobody(
    certified: Callable[[], bytes], refusing: str, federation: Federation
) -> None:
    ours = Certified(federation.root / "south" / "kit", "south")
    theirs = Certified(federation.root / "north" / "kit", "north")
    assert theirs.verify("south", ours.certificate, ours.sign(b"x"), b"x")
    assert not theirs.verify("south", ours.certificate, ours.sign(b"x"), b"y")
    assert not theirs.verify("west", ours.certificate, ours.sign(b"x"), b"x")
    assert not theirs.verify("south", certified(), ours.sign(b"x"), b"x"), refusing
    write_kit(federation.root / "south", "south", certified=certified())
    with pytest.raises(FedtailorError, match="south"):
        Certified(federation.root / "south" / "kit", "south")


def fault_of(federation: Federation, **experiment: Any) -> str:
    """What north's log says of a run that the server begins with other settings."""
    channel = Recorded(federation.sites())
    federation.run(channel)
    begin = next(read_letter(content) for _, content in channel.letters if read_letter(content).kind == "begin")
    header = {**begin.header, "experiment": {**begin.header["experiment"], **experiment}}
    answer = federation.sites()["north"].answer(Letter("begin", header, begin.tensors).pack())
    assert read_letter(answer).header["fault"] == "refused"
    return (federation.root / "north" / "private" / "site.log").read_text().splitlines()[-1]


def test_a_server_that_asks_without_it_is_refused_whatever_the_site_allows(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="ditto", secure=True, model="mlp:4", site={"allow": ["ditto"]}, rounds=1)
    for name in federation.data:
        write_kit(tmp_path / name, name)
    assert "The server asks for secure False, but the plan says True" in fault_of(federation, secure=False)


def test_a_site_without_keys_does_not_take_part(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="ditto", secure=True, model="mlp:4", rounds=1)
    with heard(), pytest.raises(FedtailorError, match="no client could do its work"):
        federation.run()
    assert "Secure aggregation needs the site's keys" in (tmp_path / "north" / "private" / "site.log").read_text()


def test_a_restart_does_not_make_a_site_forget_whose_sum_it_opened(tmp_path: Path) -> None:
    assert Opened(tmp_path)(3, "abc") == "abc"
    assert Opened(tmp_path)(3, "other") == "abc"
    assert Opened(tmp_path)(4, "other") == "other"
    (tmp_path / "opened.json").write_text("{}")
    with pytest.raises(FedtailorError):
        Opened(tmp_path)(3, "abc")


def test_the_server_cannot_have_a_site_s_name(tmp_path: Path) -> None:
    with pytest.raises(FedtailorError, match="are both called north"):
        Federation(tmp_path, plan={"server": "north"}, method="ditto", secure=True).plan  # noqa: B018


def test_the_ledger_counts_the_noise_of_as_many_as_a_sum_has_at_least(federation: Federation, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    from fedtailor.sites.preview import preview
    from fedtailor.sites.site_file import read_site

    noise = []
    for secure in (False, True):
        root = tmp_path / f"{secure}"
        made = Federation(root, method="fedavg", privacy="client, noise=3.0, by=clients", secure=secure, model="mlp:4")
        budget = preview(read_site(root / "north" / "site.toml"), made.plan).budget
        assert budget is not None
        ((release, _),) = budget.training.items()
        noise.append(release.noise)
    assert noise == pytest.approx([3.0 / 3**0.5, 3.0 * (threshold(3) / 3) ** 0.5])
