"""States by number and version: what is proposed, what is current, what is on the disk when."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor._common.files import append, fsync_file, fsync_files, truncate, write_atomically
from fedtailor.messages import NEVER, State, frame, unframe
from fedtailor.messages.store import Store
from tests.helpers import assert_same
from tests.kills.engine import killed_while_writing


@pytest.fixture(params=[False, True], ids=["in memory", "on disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of clients' states whose files are in `tmp_path`."""
    return Store(tmp_path, "client", request.param)


def state(value: float) -> State:
    return {"w": torch.full((3,), value), "count": torch.tensor(int(value))}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def file(number: int, round: int, owner: str = "client") -> str:
    return f"{owner}-{number}-round-{round}.safetensors"


def checkpointed(store: Store) -> None:
    """Do to a store what a checkpoint does."""
    store.save()
    store.prune()


# --- proposals ---


def test_a_proposal_is_not_current_before_it_is_accepted(store: Store, tmp_path: Path) -> None:
    assert store.get(0) == {}
    assert store.propose(0, state(1), 1) == 1
    assert store.get(0) == {}
    assert store.current == {}
    store.accept([0])
    assert_same(store.get(0), state(1))
    store.propose(0, state(2), 2)
    assert_same(store.get(0), state(1))
    store.accept([0])
    assert_same(store.get(0), state(2))
    assert store.current == {0: 2}
    store.accept([0, 7])  # who proposed nothing keeps what it has
    assert_same(store.get(0), state(2))
    assert store.current == {0: 2}


def test_only_those_are_accepted_who_are_named(store: Store, tmp_path: Path) -> None:
    for number in range(3):
        store.propose(number, state(number), 1)
    store.accept([0, 2])
    assert store.current == {0: 1, 2: 1}
    assert store.get(1) == {}


def test_a_version_that_the_server_names_becomes_current(store: Store, tmp_path: Path) -> None:
    """A site that never heard that its round counted learns it from the next request."""
    store.put(0, state(1), 1)
    store.propose(0, state(4), 4)
    assert_same(store.at(0, 4), state(4))
    assert store.current == {0: 4}
    assert_same(store.at(0, 4), state(4))  # and asked for once more


def test_a_later_proposal_that_never_counted_is_dropped(store: Store, tmp_path: Path) -> None:
    """A site that ran ahead steps back."""
    store.put(0, state(1), 1)
    store.propose(0, state(4), 4)
    assert_same(store.at(0, 1), state(1))
    store.accept([0])  # nothing is left to be accepted
    assert_same(store.get(0), state(1))
    assert store.current == {0: 1}
    if store.on_disk:
        assert names(tmp_path) == {file(0, 1)}
    with pytest.raises(ft.FedtailorError):
        store.at(0, 4)


def test_a_first_proposal_that_never_counted_is_dropped(store: Store, tmp_path: Path) -> None:
    store.propose(0, state(1), 1)
    assert store.at(0, NEVER) == {}
    store.accept([0])
    assert store.get(0) == {}
    assert names(tmp_path) == set()


def test_another_proposal_takes_the_place_of_the_first(store: Store, tmp_path: Path) -> None:
    store.propose(0, state(1), 1)
    store.propose(0, state(2), 2)
    store.accept([0])
    assert_same(store.get(0), state(2))
    assert store.current == {0: 2}
    if store.on_disk:
        assert names(tmp_path) == {file(0, 2)}


@pytest.mark.parametrize("version", [2, 5])
def test_a_version_that_is_not_here_is_refused_in_one_sentence(store: Store, version: int, tmp_path: Path) -> None:
    store.put(7, state(3), 3)
    says = rf"^The state of round {version} is not here: client 7 has lost it, or is another one\.$"
    with pytest.raises(ft.FedtailorError, match=says):
        store.at(7, version)
    assert_same(store.at(7, 3), state(3))


def test_a_state_that_the_server_does_not_know_of_is_named(store: Store, tmp_path: Path) -> None:
    store.put(7, state(3), 3)
    with pytest.raises(ft.FedtailorError, match=r"^client 7 has a state of round 3 that the server does not know"):
        store.at(7, NEVER)
    assert_same(store.at(7, 3), state(3))


def test_a_version_of_a_client_that_has_no_state_is_refused() -> None:
    with pytest.raises(ft.FedtailorError, match=r"^The state of round 3 is not here: client 0 has lost it"):
        Store(None, "client").at(0, 3)
    assert Store(None, "client").at(0, NEVER) == {}


def test_a_client_that_keeps_nothing_leaves_no_trace(store: Store, tmp_path: Path) -> None:
    assert store.propose(0, {}, 1) == NEVER
    store.accept([0])
    store.save()
    assert store.current == {}
    assert names(tmp_path) == set()
    assert store.at(0, NEVER) == {}


def test_a_state_that_becomes_empty_replaces_the_old_one(store: Store, tmp_path: Path) -> None:
    store.put(0, state(1), 1)
    checkpointed(store)
    assert store.propose(0, {}, 2) == 2
    assert_same(store.get(0), state(1))
    store.accept([0])
    assert store.get(0) == {}
    assert store.current == {0: 2}
    assert store.at(0, 2) == {}
    checkpointed(store)
    assert names(tmp_path) == {file(0, 2)}
    for again in (Store(tmp_path, "client", store.on_disk), Store(tmp_path, "client", not store.on_disk)):
        again.restore({0: 2})
        assert again.get(0) == {}
        assert again.at(0, 2) == {}
    store.put(0, state(3), 3)  # and back again
    assert_same(store.get(0), state(3))


def test_states_on_disk_are_not_held_in_memory(tmp_path: Path) -> None:
    store = Store(tmp_path, "client", on_disk=True)
    store.put(0, state(1), 1)
    one, other = store.get(0), store.get(0)
    assert one["w"].data_ptr() != other["w"].data_ptr()
    assert store._memory == {}
    store.propose(0, state(2), 2)
    assert store._proposed == {0: (2, {})}
    with pytest.raises(ft.FedtailorError, match="States on disk need a run directory"):
        Store(None, "client", on_disk=True)


def test_without_a_directory_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(None, "client")
    store.put(0, state(1), 1)
    checkpointed(store)
    assert names(tmp_path) == set()
    assert_same(store.get(0), state(1))


# --- on the disk ---


def go_back(store: Store) -> State:
    """Restore client 0's state of round 4 and read it."""
    store.restore({0: 4})
    return store.get(0)


def test_what_is_saved_comes_back(store: Store, tmp_path: Path) -> None:
    for number in range(5):
        store.put(number, state(number), number + 1)
    checkpointed(store)
    versions = dict(store.current)
    for other in (False, True):  # a run may go on in memory or on disk, as it likes
        again = Store(tmp_path, "client", other)
        again.restore(versions)
        assert again.current == versions
        for number in range(5):
            assert_same(again.get(number), state(number))
            assert_same(again.at(number, number + 1), state(number))


def test_what_the_last_manifest_names_stays_until_the_next_is_written(store: Store, tmp_path: Path) -> None:
    """`prune` comes after the manifest; before it, both versions are there."""
    store.put(0, state(1), 1)
    checkpointed(store)
    for round in (2, 3):
        store.put(0, state(round), round)
    assert names(tmp_path) == ({file(0, 1), file(0, 3)} if store.on_disk else {file(0, 1)})
    store.save()
    assert names(tmp_path) == {file(0, 1), file(0, 3)}
    crashed = Store(tmp_path, "client", store.on_disk)
    crashed.restore({0: 1}, sweep=False)
    assert_same(crashed.get(0), state(1))
    store.prune()
    assert names(tmp_path) == {file(0, 3)}
    assert_same(store.get(0), state(3))


def test_a_state_that_a_manifest_names_outlives_a_proposal_of_the_same_number(store: Store, tmp_path: Path) -> None:
    store.put(0, state(1), 1)
    checkpointed(store)
    store.propose(0, state(2), 2)
    store.at(0, 1)
    checkpointed(store)
    assert names(tmp_path) == {file(0, 1)}
    assert_same(store.get(0), state(1))


def test_only_what_changed_is_written_and_made_durable(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        durable.append("its directory" if path == tmp_path else path.name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    for number in range(40):
        store.put(number, state(number), 1)
    assert durable == []  # a round does not wait for the disk
    checkpointed(store)
    assert durable.pop() == "its directory"  # behind the files whose names it has
    assert sorted(durable) == sorted(names(tmp_path)) == sorted(file(number, 1) for number in range(40))
    durable.clear()
    store.put(3, state(9), 2)
    checkpointed(store)
    assert durable == [file(3, 2), "its directory"]
    durable.clear()
    store.save()
    assert durable == []


@pytest.mark.parametrize("started", ["refused", "never at work", "at work"])
def test_files_are_synced_with_helpers_or_without(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where threads or memory are limited, a thread cannot be started, or has no memory to begin its work."""
    paths, synced, fsync = [tmp_path / str(number) for number in range(40)], list[str](), os.fsync

    def start(work: Callable[[], None], arguments: tuple[()]) -> None:
        if started == "refused":
            raise RuntimeError("can't start new thread")

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    if started != "at work":
        monkeypatch.setattr("fedtailor._common.files.start_new_thread", start)
    monkeypatch.setattr(os, "fsync", record)
    for path in paths:
        path.touch()
    fsync_files(paths)
    assert sorted(synced) == sorted(path.name for path in paths)
    fsync_files([])
    paths[20].unlink()
    with pytest.raises(ft.FedtailorError, match=r"20 cannot be written \(No such file or directory\)"):
        fsync_files(paths)


def test_going_back_sweeps_what_does_not_count_and_nothing_else(store: Store, tmp_path: Path) -> None:
    for number in range(3):
        store.put(number, state(number), 1)
    store.save()
    left = [file(0, 2), file(2, 7), file(1, 1) + ".tmp", file(9, 1)]
    foreign = ["notes.txt", file(0, 2, "server"), "client-x-round-1.safetensors", "client-1-round-2.safetensors.old"]
    for name in left + foreign:
        (tmp_path / name).write_bytes(b"half")
    looking = Store(tmp_path, "client", store.on_disk)
    looking.restore({0: 1, 1: 1}, sweep=False)
    assert set(left) < names(tmp_path)  # who looks removes nothing
    assert_same(looking.get(1), state(1))
    again = Store(tmp_path, "client", store.on_disk)
    again.restore({0: 1, 1: 1})
    assert names(tmp_path) == {file(0, 1), file(1, 1), *foreign}
    assert again.get(2) == {}
    assert again.current == {0: 1, 1: 1}


def test_going_back_forgets_what_came_after(store: Store, tmp_path: Path) -> None:
    store.put(0, state(1), 1)
    checkpointed(store)
    store.put(0, state(2), 2)
    store.put(1, state(2), 2)
    store.propose(0, state(3), 3)
    store.restore({0: 1})
    store.accept([0, 1])
    assert store.current == {0: 1}
    assert_same(store.get(0), state(1))
    assert store.get(1) == {}
    checkpointed(store)
    assert names(tmp_path) == {file(0, 1)}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"sender": "client-1", "round": 4}, "its sender is client-1, not client-0"),
        ({"sender": "server-0", "round": 4}, "its sender is server-0, not client-0"),
        ({"sender": "client-0", "round": 3}, "its round is 3, not 4"),
        ({"sender": "client-0"}, "its round is None, not 4"),
    ],
)
def test_a_file_of_another_client_or_round_is_refused(
    store: Store, header: dict[str, str | int], says: str, tmp_path: Path
) -> None:
    (tmp_path / file(0, 4)).write_bytes(frame(state(1), **header))
    with pytest.raises(ft.FedtailorError, match=rf"client-0-round-4\.safetensors is not what it should be: {says}"):
        go_back(store)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 100, "half", "foreign", None])
def test_a_damaged_or_missing_file_is_named(store: Store, content: bytes | str | None, tmp_path: Path) -> None:
    from safetensors.torch import save

    whole = frame(state(1), sender="client-0", round=4)
    if content is not None:
        found = {"half": whole[: len(whole) - 5], "foreign": save(state(1))}
        (tmp_path / file(0, 4)).write_bytes(content if isinstance(content, bytes) else found[content])
    with pytest.raises(ft.FedtailorError, match=r"client-0-round-4\.safetensors cannot be read"):
        go_back(store)


# --- whole or not at all ---


def test_nothing_is_appended_cut_or_replaced_through_a_link(tmp_path: Path) -> None:
    key, link = tmp_path / "id_ed25519", tmp_path / "rounds.jsonl"
    key.write_bytes(b"private")
    link.symlink_to(key)
    for change in (lambda: append(link, b"more", 7), lambda: truncate(link, 3), lambda: fsync_file(link)):
        with pytest.raises(ft.FedtailorError, match=r"rounds.jsonl cannot be written"):
            change()
    write_atomically(link, b"ours")
    assert (key.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"private", b"ours", False)


def dropped(store: Store) -> None:
    store.propose(0, state(2), 2)
    store.propose(0, state(3), 3)


def pruned(store: Store) -> None:
    store.put(0, state(2), 2)
    store.save()
    store.prune()


def replaced(store: Store) -> None:
    store.put(0, state(2), 2)
    store.put(0, state(3), 3)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "work", [dropped, pruned, replaced, lambda store: store.restore({}), lambda store: store.forget(0, set())]
)
def test_a_file_that_cannot_be_removed_is_one_sentence(
    work: Callable[[Store], None], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, "client", on_disk=True)
    store.put(0, state(1), 1)
    store.save()
    store.prune()
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".tmp":
            return unlink(path, missing_ok)
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(ft.FedtailorError, match=rf"client-0-round-.*cannot be written \({os.strerror(code)}\)"):
        work(store)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_atomically(path, "old")
    killed_while_writing("manifest", lambda: write_atomically(path, "much newer"))
    assert path.read_text() == "old"
    write_atomically(path, b"much newer")
    assert path.read_bytes() == b"much newer"
    assert names(tmp_path) == {"manifest.json"}


def test_the_final_name_never_has_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of the rename the content is complete, and before it the name is not there."""
    seen: list[str] = []
    replace = Path.replace

    def watching(path: Path, to: Path) -> Path:
        assert not Path(to).exists()
        unframe(path.read_bytes(), "it", sender="client-0", round=1)
        seen.append(Path(to).name)
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", watching)
    store = Store(tmp_path, "client", on_disk=True)
    store.put(0, state(1), 1)
    assert seen == [file(0, 1)]


def test_a_kill_in_the_middle_of_writing_leaves_the_old_state(store: Store, tmp_path: Path) -> None:
    store.put(0, state(1), 1)
    checkpointed(store)
    before = (tmp_path / file(0, 1)).read_bytes()

    def work() -> None:
        store.put(0, state(2), 2)
        store.save()

    killed_while_writing("client-0-round-2", work)
    assert names(tmp_path) == {file(0, 1), file(0, 2) + ".tmp"}  # under its own name it would be taken for whole

    def again() -> None:  # the same round once more, over a file of the same name
        store.put(0, state(7), 1)
        store.save()

    killed_while_writing("client-0-round-1", again)
    assert (tmp_path / file(0, 1)).read_bytes() == before
    after = Store(tmp_path, "client", store.on_disk)
    after.restore({0: 1})
    assert_same(after.get(0), state(1))
    assert names(tmp_path) == {file(0, 1)}
