"""Import rules: who may know whom. Imports inside functions and under TYPE_CHECKING count too."""

from pathlib import Path

import pytest

from docs.building.imports import (
    LAYERS,
    PACKAGE,
    cycle,
    imported,
    imports,
    module_name,
    reachable,
    reduced,
    room,
    rooms,
)

IMPORTS = imports()


def files_of(name: str) -> dict[Path, set[str]]:
    found = {path: modules for path, modules in IMPORTS.items() if room(module_name(path)) == name}
    assert found, f"there is no room {name}"
    return found


LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
CARRIERS = {"workers", "processes", "shared_memory", "queue", "channel", "remote"}
CARRIERS |= {"transports", "ray_actors", "ray_parcels", "ray_session"}


def test_a_room_imports_only_from_the_layers_below_it() -> None:
    """So there are no cycles; and rooms of one layer, such as client and server, do not know each other."""
    graph = rooms()
    assert graph.keys() == LEVELS.keys()
    upwards = {(name, other) for name, others in graph.items() for other in others if LEVELS[other] >= LEVELS[name]}
    assert upwards == set()


def test_the_house_stays_one_that_a_newcomer_can_count() -> None:
    graph = rooms()
    assert len(graph) <= 20
    assert sum(map(len, graph.values())) <= 120
    assert len(LAYERS) <= 10
    assert len(list(PACKAGE.glob("*.py"))) <= 5


def test_a_module_is_not_named_like_another_or_after_an_activity() -> None:
    """Commands are named like what they call, and subpackages have names of their own."""
    names = [path.stem for path in PACKAGE.glob("*/*.py") if path.stem != "__init__" and path.parent.name != "cli"]
    assert {name for name in names if names.count(name) > 1} == set()
    nouns = {"testing", "clipping", "preprocessing", "fine_tuning", "gradient_matching"}
    assert {path.stem for path in PACKAGE.rglob("*ing.py")} <= nouns


@pytest.mark.parametrize(("one", "other"), [("server", "client"), ("client", "server")])
def test_server_and_client_do_not_know_each_other_by_way_of_a_third(one: str, other: str) -> None:
    graph = rooms()
    assert other in graph
    assert not reachable(one, graph) & {other, "engines"}


def test_a_method_knows_its_interface_and_nothing_else() -> None:
    """The catalogue itself also finds methods by `module:Class`."""
    for path, modules in files_of("methods").items():
        allowed = {"method", "training", "methods"}
        known = {module for module in modules if room(module) not in allowed}
        imports = {"fedtailor._common.imports"} if path.name == "__init__.py" else set()
        assert known <= {"fedtailor._common.errors", *imports}, path.name


def test_what_carries_messages_knows_them_and_nothing_else() -> None:
    carriers = {path: modules for path, modules in files_of("engines").items() if path.stem in CARRIERS}
    assert {path.stem for path in carriers} == CARRIERS
    for path, modules in carriers.items():
        known = {module for module in modules if room(module) not in ("messages", "_common")}
        assert known <= {f"fedtailor.engines.{name}" for name in CARRIERS}, path.name


def test_privacy_is_functions_of_numbers_and_tensors() -> None:
    assert rooms()["privacy"] <= {"_common"}


# --- the rules see what they should see ---


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import fedtailor.client.sites", {"fedtailor.client.sites"}),
        ("from fedtailor.client import sites", {"fedtailor.client.sites"}),
        ("from fedtailor.client import nothing", {"fedtailor.client"}),
        ("from fedtailor import client, run", {"fedtailor.client", "fedtailor"}),
        ("from ..client.sites import Sites", {"fedtailor.client.sites"}),
        ("from . import loop", {"fedtailor.server.loop"}),
        ("def f():\n    from fedtailor.client.sites import Sites", {"fedtailor.client.sites"}),
        ("if TYPE_CHECKING:\n    import fedtailor.client as s", {"fedtailor.client"}),
        ("try:\n    import os\nexcept OSError:\n    from fedtailor.client import sites", {"fedtailor.client.sites"}),
        ("import torch, os.path\nfrom fedtailored import client", set()),
    ],
)
def test_every_kind_of_import_is_seen(text: str, modules: set[str], tmp_path: Path) -> None:
    root = tmp_path / "fedtailor"
    for name in ("__init__.py", "client/__init__.py", "client/sites.py", "server/__init__.py", "server/loop.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    path = root / "server/other.py"
    path.write_text(text)
    assert set(imported(path, root)) == modules


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c", "b"]
    assert cycle({"a": {"a"}}) == ["a", "a"]
    assert reachable("a", {"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}


def test_an_import_that_follows_from_others_is_left_out_of_the_picture() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert reduced(graph) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}
