"""Import rules: who may know whom. Imports inside functions and under TYPE_CHECKING count too.

A room is a module or a subpackage at the top of the package; `fedtailor` itself is the front door.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedtailor

ROOT = Path(fedtailor.__file__).parent
DOOR = "fedtailor"


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, root: Path = ROOT) -> Iterator[str]:
    """The modules of the package that a file imports, wherever in it."""
    known = {module_name(found, root) for found in root.rglob("*.py")}
    package = module_name(path, root) if path.name == "__init__.py" else module_name(path, root).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == DOOR)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = [*above[: len(above) - node.level + 1], node.module or ""] if node.level else [node.module or ""]
            source = ".".join(part for part in base if part)
            if source.split(".")[0] == DOOR:
                for alias in node.names:  # a name, or a module of a package
                    yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in known else source


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else DOOR


IMPORTS = {path: set(imported(path)) for path in sorted(ROOT.rglob("*.py"))}


def rooms() -> dict[str, set[str]]:
    """What rooms each room imports from, itself left out."""
    graph: dict[str, set[str]] = {room(module_name(path)): set() for path in IMPORTS}
    for path, modules in IMPORTS.items():
        here = room(module_name(path))
        graph[here] |= {room(module) for module in modules} - {here}
    return graph


def files_of(name: str) -> dict[Path, set[str]]:
    found = {path: modules for path, modules in IMPORTS.items() if room(module_name(path)) == name}
    assert found, f"there is no room {name}"
    return found


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """All rooms that one imports from, by way of others too."""
    found, left = set[str](), [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One way from a room back to itself; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for after in sorted(graph.get(name, ())):
            if found := visit(after, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


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
