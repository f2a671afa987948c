"""Privacy at real sites: the noise is theirs and the system's, the plan's, and cannot be asked for again and again."""

from pathlib import Path

import pytest
import torch

from fedtailor.messages.letters import read_letter
from fedtailor.privacy.noise import Noise
from tests.sites.parts import Federation, Recorded

SHARED = "client, clip=0.5, noise=1.0, by=clients"


def test_uploads_leave_clipped_and_noised(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="fedavg", privacy="client, clip=0.01, noise=1e-9, by=clients")
    channel = Recorded(federation.sites())
    result = federation.run(channel)
    trained = [
        (read_letter(letter), read_letter(answer))
        for (_, letter), (_, answer) in zip(channel.letters, channel.answers, strict=True)
        if read_letter(letter).header.get("asked") == "train"
    ]
    assert trained
    for letter, answer in trained:
        assert float((answer.tensors["theta"] - letter.tensors["theta"]).norm()) <= 0.01 * (1 + 1e-3)
    assert result.epsilon is not None
    assert "simulation" not in result.privacy_in_words


@pytest.mark.parametrize("privacy", [SHARED, "client, clip=0.5, noise=1.0"])
def test_noise_of_clients_and_of_the_server_is_the_system_s(
    privacy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Noise] = []
    normal = Noise.normal
    monkeypatch.setattr(Noise, "normal", lambda self, like, std: (drawn.append(self), normal(self, like, std))[1])
    runs = [Federation(tmp_path / name, method="fedavg", privacy=privacy).run() for name in ("one", "other")]
    assert drawn
    assert all(source.stream is None for source in drawn)
    assert not torch.equal(*(run.server_state["theta"] for run in runs))


def test_a_round_that_is_asked_for_again_and_again_is_refused(tmp_path: Path) -> None:
    """Each answer has fresh noise: their mean would have ever less of it. Nobody gets more than the plan's rounds."""
    federation = Federation(tmp_path, method="fedavg", privacy=SHARED, rounds=3)
    sites = federation.sites()
    channel = Recorded(sites)
    federation.run(channel)
    name, letter = next((n, x) for n, x in channel.letters if read_letter(x).header.get("asked") == "train")
    for site in (sites[name], federation.sites()[name]):  # a restart does not help
        answer = read_letter(site.answer(letter))
        assert answer.header.get("fault") == "refused"
        assert not answer.tensors
    log = (tmp_path / name / "private" / "site.log").read_text()
    assert "The privacy of this site's data is spent: 3 private trainings were answered" in log
    plain = Federation(tmp_path / "plain", method="fedavg", rounds=3)
    sites = plain.sites()
    channel = Recorded(sites)
    plain.run(channel)
    name, letter = next((n, x) for n, x in channel.letters if read_letter(x).header.get("asked") == "train")
    assert "fault" not in read_letter(sites[name].answer(letter)).header  # without privacy a round may be repeated


def test_a_site_refuses_less_noise_than_the_plan_says(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="fedavg", privacy=SHARED)
    sites = federation.sites()  # they have the plan as it was
    path = tmp_path / "federation.toml"
    path.write_text(path.read_text().replace("noise=1.0", "noise=0.1"))
    with pytest.raises(Exception, match="does not allow what was asked"):
        federation.run(Recorded(sites))
    assert "The server asks for privacy client, clip=0.5, noise=0.1" in (
        next(tmp_path.glob("*/private/site.log")).read_text()
    )
