"""The tool that runs released code beside ours (benchmarks/released), without any released code."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtailor as ft
from benchmarks.released import __main__ as command
from benchmarks.released import functions, surroundings
from benchmarks.released.cases import TRAININGS
from fedtailor.data import FederatedData
from fedtailor.methods import all_methods

MAIN = """
import nothing_here

if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('-bt', '--beta', type=float, default=0.5)
    args = parser.parse_args()
    run(args)
"""


def clone(directory: Path) -> Path:
    """A project of one module, in the folders that PFLlib has."""
    files = {
        "utils/data_utils.py": "import h5py, ujson\nWEIGHT = 1.0\n",
        "flcore/servers/serverbase.py": "from utils.data_utils import WEIGHT\nfrom utils.dlg import DLG\n",
        "main.py": MAIN,
    }
    for name, text in files.items():
        file = directory / "system" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return directory


def split_of(seed: int) -> FederatedData:
    """The partition that `ft.run` makes of the task, made anew."""
    names = ("clients", "partition", "min_samples", "test", "validation")
    return ft.federate(ft.load_data("digits"), seed=seed, **{name: surroundings.TASK[name] for name in names})


def test_the_split_that_releases_read_is_ours(tmp_path: Path) -> None:
    surroundings.write_split(surroundings.prepared(1).data, tmp_path)
    ours, seen = split_of(1), 0
    for client in range(ours.n_clients):
        for part, (x, y) in (("train", ours.train(client)), ("test", ours.test(client))):
            with open(tmp_path / part / f"{client}.npz", "rb") as file:  # as PFLlib reads it
                written = np.load(file, allow_pickle=True)["data"].tolist()
            assert torch.equal(torch.Tensor(written["x"]), x)
            assert torch.equal(torch.Tensor(written["y"]).long(), y)
            seen += len(y)
    assert seen == 1797  # all of digits


def test_releases_begin_with_our_network() -> None:
    terms, x = surroundings.prepared(2).terms, split_of(2).train(0)[0]
    terms.network.vector.copy_(terms.initial)
    net = surroundings.initial_net(2)
    torch.testing.assert_close(net(x), terms.network.module(x))
    assert not torch.equal(net(x), surroundings.initial_net(1)(x))


def test_a_change_is_made_in_a_copy(tmp_path: Path) -> None:
    source, here, known = clone(tmp_path), Path.cwd(), set(sys.modules)
    with surroundings.opened(source, "system", {"utils/data_utils.py": [("WEIGHT = 1.0", "WEIGHT = 2.0")]}) as place:
        from flcore.servers.serverbase import WEIGHT  # type: ignore[import-not-found]

        assert (WEIGHT, Path.cwd(), source in place.parents) == (2.0, place, False)
    assert "WEIGHT = 1.0" in (source / "system/utils/data_utils.py").read_text("utf-8")
    assert (Path.cwd(), place.exists()) == (here, False)
    assert not {name for name in set(sys.modules) - known if name.split(".")[0] in ("flcore", "utils", "h5py", "ujson")}


def test_another_version_is_refused(tmp_path: Path) -> None:
    changes = {"utils/data_utils.py": [("WEIGHT = 3.0", "")]}
    with (
        pytest.raises(ft.FedtailorError, match=r"data_utils.py is of another version .*'WEIGHT = 3.0' is not in it"),
        surroundings.opened(clone(tmp_path), "system", changes),
    ):
        pass
    with (
        pytest.raises(ft.FedtailorError, match=r"There is no pytorch in .* give the directory of a clone"),
        surroundings.opened(tmp_path, "pytorch", {}),
    ):
        pass


def test_flags_are_parsed_by_the_releases_own_parser(tmp_path: Path) -> None:
    main = clone(tmp_path) / "system/main.py"
    assert vars(surroundings.arguments(main, [])) == {"beta": 0.5, "device": "cpu"}
    assert surroundings.arguments(main, ["-bt", "2"]).beta == 2


def test_the_search_that_stands_in_for_faiss() -> None:
    store = functions.Neighbours(2)
    store.add(np.array([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]]))
    distances, indices = store.search(np.array([[0.0, 0.0]]), 3)
    assert (distances.tolist(), indices.tolist()) == ([[0.0, 1.0, 25.0]], [[0, 2, 1]])


def test_the_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["released", "--list"])
    command.main()
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert names == {*TRAININGS, *functions.CHECKS}
    monkeypatch.setattr("sys.argv", ["released", "fedntd"])
    with pytest.raises(SystemExit):
        command.main()
    assert "give a name and --source" in capsys.readouterr().err


def test_the_page_has_a_command_for_each() -> None:
    page = (Path(__file__).parent.parent / "docs/released-code.md").read_text("utf-8")
    assert {name for name in (*TRAININGS, *functions.CHECKS) if f"`{name}`" not in page} == set()


def test_settings_of_ours_are_the_methods() -> None:
    """Those of methods that this version has: a parameter by another name would be refused in a run of minutes."""
    for case in TRAININGS.values():
        for method, settings in case.ours:
            if method in all_methods():
                ft.run(
                    method, **{**surroundings.TASK, **case.task, **settings, "rounds": 1, "clients": 3, "max_train": 10}
                )
