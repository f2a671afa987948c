"""A site leaves: its states and keys are gone, models and ledger stay, and it is told what remains elsewhere."""

from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from fedtailor.sites.nvflare.processes import alone
from tests.cli.calling import Call, done, refusal
from tests.cli.calling import contents as all_files
from tests.sites.parts import Federation


@pytest.mark.parametrize("private", [False, True])
def test_what_is_removed_and_what_is_said(private: bool, tmp_path: Path, call: Call) -> None:
    privacy = {"privacy": "client, noise=2, clip=1, by=clients, delta=1e-3"} if private else {}
    federation = Federation(tmp_path / "f", method="fedper" if private else "pgfed", **privacy)
    federation.run()
    site = tmp_path / "f" / "south"
    (site / "kit" / "startup").mkdir(parents=True)
    before = all_files(site)
    assert "say --yes if you mean it" in refusal(call, "site", "leave", site / "site.toml")
    with alone(site / "private" / "start.lock"):
        said = refusal(call, "site", "leave", site / "site.toml", "--yes")
        assert said == "south takes part: end `fedtailor site start` first."
    said = done(call("site", "leave", site / "site.toml", "--yes"))
    after = all_files(site)
    gone = {name for name in before if name not in after}
    assert gone == {name for name in before if name.startswith(("kit", "private/runs", "private/tally.json"))}
    assert all(after[name] == before[name] for name in after if name != "private/start.lock")
    assert {"private/ledger.json", "private/site.log", "private/secret", "patients.csv"} <= set(after)
    assert [name for name in after if name.startswith("private/models/")]
    assert f"({federation.method}), in which south trained last in round 3:" in said
    if private:
        assert "body: the server has clipped, with noise, then the mean, from which no part can be taken out." in said
        assert "3 private trainings were answered, which cost ε = " in said
    else:
        assert "theta: the server has mean by samples, from which no part can be taken out." in said
        assert "gradient: the server has each client's own." in said
        assert "nothing bounds what this tells about the data" in said
    assert "Removed: nothing, as nothing was there." in done(call("site", "leave", site / "site.toml", "--yes"))
