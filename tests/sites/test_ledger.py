"""The ledger of a site's privacy: no server gets more private trainings out of a site's data than its budget allows."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor.client.private_queries import Release, cost_in_epsilon
from fedtailor.client.sites import Sites
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Train
from fedtailor.messages.letters import Letter, read_letter
from fedtailor.privacy.accountant import Releases, spent
from fedtailor.sites.ledger import LEDGER, Account, Budget, Ledger
from fedtailor.sites.local_site import LocalSite
from fedtailor.sites.preview import preview
from fedtailor.sites.site_file import read_site
from tests.cli.calling import Call
from tests.kills.engine import killed_while_writing
from tests.privacy.closed_forms import gaussian_epsilon
from tests.sites.parts import Federation, Recorded

SAMPLES = "sample, clip=1.0, noise=1.0"
ROUNDS = 2
OWN = "south"


class Private(Federation):
    """A federation with a private plan of two rounds, and the letters that one site gets."""

    def __init__(self, root: Path, **more: object) -> None:
        super().__init__(root, method="fedavg", **{"privacy": SAMPLES, "rounds": ROUNDS, **more})

    def letters(self) -> tuple[Letter, Letter]:
        """The letter of the beginning and that of the first training, as a server makes them; no site here gets one."""
        other = Private(self.root.parent / f"{self.root.name}-elsewhere", **self.settings)
        channel = Recorded(other.sites())
        other.run(channel)
        own = [read_letter(letter) for name, letter in channel.letters if name == OWN]
        first = {letter.header.get("asked", letter.kind): letter for letter in reversed(own)}
        return first["begin"], first["train"]

    def site(self) -> LocalSite:
        """The site, as if it had just been started."""
        return LocalSite(read_site(self.root / OWN / "site.toml"))

    @property
    def private(self) -> Path:
        return self.root / OWN / "private"

    @property
    def account(self) -> Account:
        return Ledger(self.private).read()

    def say(self, line: str, name: str = OWN) -> None:
        """Write one more setting into a site's own file."""
        file = self.root / name / "site.toml"
        file.write_text(file.read_text() + line + "\n")

    @property
    def log(self) -> str:
        return (self.private / "site.log").read_text()


@pytest.fixture
def federation(tmp_path: Path) -> Private:
    return Private(tmp_path / "federation")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Letter, Letter]:
    return Private(tmp_path_factory.mktemp("asked") / "federation").letters()


def begin(site: LocalSite, letter: Letter, run: str) -> None:
    """Have a site take part in a run of this name."""
    assert "fault" not in read_letter(site.answer(Letter("hello", {}).pack())).header
    common = {**letter.header["common"], "run": run}
    answer = read_letter(site.answer(replace(letter, header={**letter.header, "common": common}).pack()))
    assert "fault" not in answer.header


def train(site: LocalSite, letter: Letter, run: str, **header: object) -> Letter:
    """Ask a site for a training in a run of this name."""
    return read_letter(site.answer(replace(letter, header={**letter.header, "run": run, **header}).pack()))


def answered(site: LocalSite, asked: tuple[Letter, Letter], runs: Iterator[str] | list[str]) -> int:
    """Ask for a training in each of these runs; return how many were answered."""
    count = 0
    for run in runs:
        begin(site, asked[0], run)
        answer = train(site, asked[1], run)
        assert bool(answer.tensors) == ("fault" not in answer.header)
        assert answer.header.get("fault", "refused") == "refused"
        count += bool(answer.tensors)
    return count


# --- one ledger for the site's data ---


def test_a_new_name_of_a_run_buys_no_more_trainings(federation: Private, asked: tuple[Letter, Letter]) -> None:
    """With a counter for each run, 60 names got 120 answers, whose mean had a hundredth of the noise's variance."""
    assert answered(federation.site(), asked, [f"trial-{n}" for n in range(10)]) == ROUNDS
    assert "The privacy of this site's data is spent: 2 private trainings were answered" in federation.log
    assert answered(federation.site(), asked, ["after-a-restart"]) == 0
    assert federation.account.trainings == ROUNDS


def test_a_changed_row_goes_on_with_the_same_ledger(federation: Private, asked: tuple[Letter, Letter]) -> None:
    assert answered(federation.site(), asked, ["one", "two"]) == ROUNDS
    rows = federation.data[OWN].copy()
    rows.loc[3, "f0"] += 1
    rows.drop(index=7).to_csv(federation.root / OWN / "patients.csv", index=False)
    assert answered(federation.site(), asked, ["three"]) == 0


def test_all_plans_with_the_same_directory_have_one_ledger(tmp_path: Path) -> None:
    """Another noise, and so another price: what both plans released is composed."""
    first, more = Private(tmp_path / "one"), SAMPLES.replace("noise=1.0", "noise=0.9")
    assert first.run().finished
    second = Private(tmp_path / "other", privacy=more, on_failure="stop")
    for name in second.data:
        second.say(f'directory = "../../one/{name}/private"', name)
    with pytest.raises(FedtailorError, match="the site does not allow what was asked"):
        second.run()
    assert "2 private trainings were answered, and one more would cost ε" in first.log
    before = first.account
    assert before.trainings == ROUNDS
    for name in second.data:
        second.say("epsilon = 1000.0", name)
    assert second.run().finished
    cost = first.account.cost
    assert {release.noise for release in cost} == {1.0, 0.9}
    together = [Releases(release.noise, count, "poisson", release.share) for release, count in cost.items()]
    assert cost_in_epsilon(cost, Privacy.parse(more)) == spent(together, 1e-5).epsilon
    assert cost_in_epsilon(cost, Privacy.parse(more)) > cost_in_epsilon(before.cost, Privacy.parse(more))


def test_the_owner_alone_allows_more(federation: Private, asked: tuple[Letter, Letter]) -> None:
    limit = preview(read_site(federation.root / OWN / "site.toml"), federation.plan).budget
    assert limit is not None
    twice = Counter({release: 2 * count for release, count in limit.run.items()})
    federation.say(f"epsilon = {cost_in_epsilon(twice, limit.privacy)}")
    assert answered(federation.site(), asked, [f"trial-{n}" for n in range(10)]) == 2 * ROUNDS


def test_the_owner_may_allow_less(federation: Private, asked: tuple[Letter, Letter]) -> None:
    federation.say("epsilon = 0.01")
    assert answered(federation.site(), asked, ["trial"]) == 0


def test_the_plan_s_own_epsilon_is_a_limit_of_samples(tmp_path: Path) -> None:
    federation = Private(tmp_path / "federation", rounds=6)
    cost = preview(read_site(federation.root / OWN / "site.toml"), federation.plan).budget
    assert cost is not None
    for_three = cost_in_epsilon(Counter({r: 3 * n for r, n in cost.training.items()}), cost.privacy)
    limited = Private(tmp_path / "limited", rounds=6, epsilon=for_three)
    asked = limited.letters()
    assert answered(limited.site(), asked, [f"trial-{n}" for n in range(5)]) == 3


def test_a_repeated_round_is_another_draw_and_counts_again(federation: Private, asked: tuple[Letter, Letter]) -> None:
    site = federation.site()
    begin(site, asked[0], "trial")
    one, other = (train(site, asked[1], "trial").tensors["theta"] for _ in range(ROUNDS))
    assert not one.equal(other)
    assert federation.account.trainings == ROUNDS
    assert train(site, asked[1], "trial").header["fault"] == "refused"


def test_the_server_s_record_and_the_ledgers_say_the_same(federation: Private) -> None:
    result = federation.run()
    of = [Ledger(federation.root / name / "private").read() for name in federation.data]
    assert [account.trainings for account in of] == [ROUNDS] * 3
    assert result.epsilon == max(cost_in_epsilon(account.cost, Privacy.parse(SAMPLES)) for account in of)


def test_without_privacy_nothing_is_counted(tmp_path: Path) -> None:
    federation = Private(tmp_path, privacy=None)
    federation.run()
    assert federation.account == Account()


# --- what a training costs ---


def test_at_client_level_a_training_is_a_release_of_the_change() -> None:
    client, five = Privacy.parse("client, noise=3.0"), {Release("client", 3.0): 5}
    assert cost_in_epsilon(five, client) == pytest.approx(gaussian_epsilon(3.0, 5, 1e-5), rel=0.02)
    # One sample turns the change into any other: twice the clip.
    sample = Privacy.parse("sample, noise=3.0")
    assert cost_in_epsilon(five, sample) == pytest.approx(gaussian_epsilon(1.5, 5, 1e-5), rel=0.02)


def test_noise_that_hid_samples_hides_no_client() -> None:
    mixed = {Release("client", 3.0): 5, Release("sample", 50.0, 0.01): 1}
    assert cost_in_epsilon(mixed, Privacy.parse("client, noise=3.0")) == inf
    assert cost_in_epsilon(mixed, Privacy.parse("sample, noise=3.0")) < inf


@pytest.mark.parametrize(("by", "noise"), [("clients", 1.0 / 3**0.5), ("server", 1.0)])
def test_a_client_s_share_of_the_noise_is_what_hides_its_upload(by: str, noise: float, tmp_path: Path) -> None:
    federation = Private(tmp_path, privacy=f"client, clip=0.5, noise=1.0, by={by}")
    federation.run()
    assert federation.account.cost == {Release("client", noise): ROUNDS}


# --- a ledger that cannot be trusted ---


def gone(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def less(path: Path) -> None:
    """Somebody wrote a smaller number."""
    path.write_text(path.read_text().replace('"trainings": 1', '"trainings": 0'))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere.json"))
    path.symlink_to("elsewhere.json")


@pytest.mark.parametrize(
    ("damage", "words"), [(gone, "is gone"), (empty, "is damaged"), (less, "is damaged"), (linked, "is damaged")]
)
def test_without_its_ledger_a_site_answers_no_private_training(
    damage: Callable[[Path], None],
    words: str,
    federation: Private,
    asked: tuple[Letter, Letter],
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert answered(federation.site(), asked, ["trial"]) == 1
    damage(federation.private / LEDGER)
    site = federation.site()
    assert answered(site, asked, ["trial", "another"]) == 0
    assert f"ledger.json, {words}: bring back its newest copy" in federation.log
    (problem,) = preview(site.site, federation.plan).problems
    assert words in problem
    shown = call("site", "status", str(federation.root / OWN / "site.toml"))
    assert shown.code == 2
    assert words in " ".join(shown.err.split())


# --- killed, and two at once ---


def child(work: Callable[[], object]) -> int | None:
    """Do this in a process of its own; return its exit code."""
    process = get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode


def test_a_training_is_written_down_before_it_begins(
    federation: Private, asked: tuple[Letter, Letter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that is killed at its work has spent it: nobody knows what of the answer got out."""
    site, handle = federation.site(), Sites.handle
    begin(site, asked[0], "trial")

    def killed(self: Sites, request: object) -> object:
        if isinstance(request, Train):
            os.kill(os.getpid(), signal.SIGKILL)
        return handle(self, request)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Sites, "handle", killed)
        assert child(lambda: train(site, asked[1], "trial")) == -signal.SIGKILL
    assert federation.account.trainings == 1
    assert answered(federation.site(), asked, ["trial", "other", "third"]) == ROUNDS - 1


def test_what_is_spent_is_on_the_disk_before_the_work(
    federation: Private, asked: tuple[Letter, Letter], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, done, fsync, handle = federation.site(), list[str](), os.fsync, Sites.handle
    begin(site, asked[0], "trial")

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Sites, "handle", lambda self, request: (done.append("work"), handle(self, request))[1])
    train(site, asked[1], "trial")
    assert done[: done.index("work")] == ["ledger.json.tmp", "private"]


def test_a_kill_in_the_middle_of_writing_leaves_the_ledger_whole(
    federation: Private, asked: tuple[Letter, Letter]
) -> None:
    site = federation.site()
    begin(site, asked[0], "trial")
    killed_while_writing("ledger", lambda: train(site, asked[1], "trial"))
    assert federation.account == Account()
    assert answered(federation.site(), asked, ["trial", "other", "third"]) == ROUNDS


def test_two_processes_at_once_spend_it_once(tmp_path: Path) -> None:
    ledger, cost = Ledger(tmp_path), {Release("sample", 1.0, 0.1): 3}
    budget = Budget(Privacy.parse(SAMPLES), cost, rounds=40)
    ledger.open()

    def work() -> None:
        done = 0
        for _ in range(30):
            try:
                ledger.spend(budget)
                done += 1
            except FedtailorError:
                break
        os._exit(done)

    processes = [get_context("fork").Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sum(process.exitcode or 0 for process in processes) == 40
    assert ledger.read().trainings == 40
    assert ledger.read().cost == {Release("sample", 1.0, 0.1): 120}


def test_a_lost_state_is_refused_before_anything_is_spent(federation: Private, asked: tuple[Letter, Letter]) -> None:
    site = federation.site()
    begin(site, asked[0], "trial")
    answer = train(site, asked[1], "trial", round=2, accepted=1)
    assert answer.header["fault"] == "state"
    assert federation.account.trainings == 0


# --- what `allow` does not allow ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"privacy": None}, "asks for privacy"),
        ({"privacy": SAMPLES.replace("1.0", "0.1")}, "asks for privacy"),
        ({"epsilon": "inf"}, "asks for epsilon"),
        ({"epochs": 500}, "asks for epochs 500"),
    ],
)
def test_a_method_that_is_allowed_is_no_way_around_the_privacy(
    change: dict[str, object], words: str, federation: Private, asked: tuple[Letter, Letter]
) -> None:
    federation.say('allow = ["fedavg"]')
    header = {**asked[0].header, "experiment": {**asked[0].header["experiment"], **change}}
    answer = read_letter(federation.site().answer(replace(asked[0], header=header).pack()))
    assert answer.header["fault"] == "refused"
    assert words in federation.log


def test_other_settings_that_are_allowed_pay_their_own_price(federation: Private, asked: tuple[Letter, Letter]) -> None:
    federation.say('allow = ["fedavg"]\nepsilon = 100.0')
    header = {**asked[0].header, "experiment": {**asked[0].header["experiment"], "epochs": 3}}
    assert answered(federation.site(), (replace(asked[0], header=header), asked[1]), ["trial"]) == 1
    (count,) = federation.account.cost.values()
    rows = len(pd.read_csv(federation.root / OWN / "patients.csv"))
    assert count % 3 == 0
    assert count > rows * 0.5 / 16 * 3 - 3


# --- what its owner sees ---


def test_check_and_status_say_what_is_spent(federation: Private, asked: tuple[Letter, Letter], call: Call) -> None:
    file = str(federation.root / OWN / "site.toml")
    before = " ".join(call("site", "check", file).out.split())
    assert "So far 0 private trainings were answered, which cost ε = 0 at δ = 1e-05 (sample level)." in before
    assert not federation.private.exists()
    assert answered(federation.site(), asked, ["trial"]) == 1
    found = preview(read_site(Path(file)), federation.plan)
    assert found.account is not None
    assert found.budget is not None
    assert found.account.cost == found.budget.training  # computed in the rehearsal, and by the site at work
    once, twice = (
        cost_in_epsilon(Counter({r: n * times for r, n in found.budget.training.items()}), found.budget.privacy)
        for times in (1, 2)
    )
    assert found.plain()["privacy"] == {"trainings": 1, "spent": once, "run": twice, "most": twice}
    shown = " ".join(call("site", "check", file).out.split())
    assert f"Here one run of the plan costs ε = {twice:.3g}. So far 1 private training was answered" in shown
    assert "(`epsilon` in site.toml): not all rounds will be answered." in shown
    status = " ".join(call("site", "status", file).out.split())
    assert f"1 private training was answered, which cost ε = {once:.3g} at δ = 1e-05 (sample level)." in status
    assert "All together may cost what one run of the plan costs" in status
    federation.say("epsilon = 7.5")
    assert "may cost ε = 7.5 at most" in " ".join(call("site", "status", file).out.split())
    Path(file).write_text(Path(file).read_text().replace("epsilon = 7.5", ""))
    assert answered(federation.site(), asked, ["other"]) == 1
    again = call("site", "check", file)
    assert again.code == 1
    assert "The privacy of this site's data is spent: 2 private trainings" in " ".join(again.out.split())
