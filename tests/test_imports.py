"""Import rules: who may know whom. Imports inside functions and under TYPE_CHECKING count too."""

from pathlib import Path

import pytest

from docs.building.imports import cycle, imported, imports, module_name, reachable, reduced, room, rooms

IMPORTS = imports()


def files_of(name: str) -> dict[Path, set[str]]:
    found = {path: modules for path, modules in IMPORTS.items() if room(module_name(path)) == name}
    assert found, f"there is no room {name}"
    return found


@pytest.mark.parametrize(("one", "other"), [("server", "site"), ("site", "server")])
def test_server_and_site_do_not_know_each_other(one: str, other: str) -> None:
    """Nor by way of a third."""
    graph = rooms()
    assert other in graph
    assert other not in reachable(one, graph)
    assert "simulation" not in reachable(one, graph)  # where both are


def test_a_method_knows_its_interface_and_nothing_else() -> None:
    """The catalogue itself also finds methods by `module:Class`."""
    for path, modules in files_of("methods").items():
        allowed = {"method", "schedule", "local", "errors", "methods"} | (
            {"imports"} if path.name == "__init__.py" else set()
        )
        assert {room(module) for module in modules} <= allowed, path.name


def test_a_transport_knows_messages_and_nothing_else() -> None:
    for path, modules in files_of("transport").items():
        known = {"messages", "letters", "errors", "transport", "version"}
        assert {room(module) for module in modules} <= known, path.name
    unknown = {"method", "methods", "data", "site", "server", "local", "simulation", "experiment", "store"}
    assert not reachable("transport", rooms()) & unknown


def test_what_crosses_the_wall_knows_neither_side() -> None:
    for name in ("messages", "method", "store", "local"):
        assert not reachable(name, rooms()) & {"server", "site", "transport", "simulation", "data", "methods"}, name


def test_studies_do_not_know_reports() -> None:
    assert "reporting" not in reachable("studies", rooms())


def test_there_are_no_cycles_between_rooms() -> None:
    assert cycle(rooms()) == []


# --- the rules see what they should see ---


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import fedtailor.site.sites", {"fedtailor.site.sites"}),
        ("from fedtailor.site import sites", {"fedtailor.site.sites"}),
        ("from fedtailor.site import nothing", {"fedtailor.site"}),
        ("from fedtailor import site, run", {"fedtailor.site", "fedtailor"}),
        ("from ..site.sites import Sites", {"fedtailor.site.sites"}),
        ("from . import loop", {"fedtailor.server.loop"}),
        ("def f():\n    from fedtailor.site.sites import Sites", {"fedtailor.site.sites"}),
        ("if TYPE_CHECKING:\n    import fedtailor.site as s", {"fedtailor.site"}),
        ("try:\n    import torch\nexcept ImportError:\n    from fedtailor.site import sites", {"fedtailor.site.sites"}),
        ("import torch, os.path\nfrom fedtailored import site", set()),
    ],
)
def test_every_kind_of_import_is_seen(text: str, modules: set[str], tmp_path: Path) -> None:
    root = tmp_path / "fedtailor"
    for name in ("__init__.py", "site/__init__.py", "site/sites.py", "server/__init__.py", "server/loop.py"):
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
