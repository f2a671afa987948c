"""The imports of the package, read off its code: wherever in a file they are, in functions and under TYPE_CHECKING too.

A room is a module or a subpackage at the top of the package; `fedtailor` itself (`__init__`, `__main__`) is the front
door. `LAYERS` is the rule that `tests/test_imports.py` keeps, and the picture in the documentation is drawn by it.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import fedtailor

PACKAGE = Path(fedtailor.__file__).parent
DOOR = "fedtailor"

# A room imports only from rooms in layers below its own: never upwards, and never beside it.
LAYERS = (
    ("_common",),
    ("messages", "privacy"),
    ("training",),
    ("data", "models", "experiment", "method"),
    ("methods", "client", "server"),
    ("engines",),
    ("studies", "model_files", "attacks", "testing"),
    ("sites", "reporting"),
    ("cli",),
    (DOOR,),
)

Graph = Mapping[str, set[str]]  # by room: the rooms that it imports from


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """The dotted name of a file's module."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(package: Path = PACKAGE) -> set[str]:
    """The names of all modules of the package."""
    return {module_name(path, package) for path in package.rglob("*.py")}


def imported(path: Path, package: Path = PACKAGE) -> Iterator[str]:
    """Yield the modules of the package that a file imports."""
    known = modules(package)
    inside = module_name(path, package) if path.name == "__init__.py" else module_name(path, package).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == DOOR)
        elif isinstance(node, ast.ImportFrom):
            above = inside.split(".")
            base = [*above[: len(above) - node.level + 1], node.module or ""] if node.level else [node.module or ""]
            source = ".".join(part for part in base if part)
            if source.split(".")[0] == DOOR:
                for alias in node.names:  # a name, or a module of a package
                    yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in known else source


def room(module: str) -> str:
    """The room of a module."""
    name = module.split(".")[1] if "." in module else DOOR
    return DOOR if name == "__main__" else name


@cache
def imports() -> dict[Path, set[str]]:
    """The modules of the package that each of its files imports."""
    return {path: set(imported(path)) for path in sorted(PACKAGE.rglob("*.py"))}


def rooms() -> dict[str, set[str]]:
    """The rooms that each room imports from, itself left out."""
    found = imports()
    graph: dict[str, set[str]] = {room(module_name(path)): set() for path in found}
    for path, modules in found.items():
        here = room(module_name(path))
        graph[here] |= {room(module) for module in modules} - {here}
    return graph


def reachable(start: str, graph: Graph) -> set[str]:
    """All rooms that one imports from, by way of others too."""
    found, left = set[str](), [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def cycle(graph: Graph) -> list[str]:
    """Find one way from a room back to itself; empty if there is none."""
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


def reduced(graph: Graph) -> dict[str, set[str]]:
    """Leave out the imports that follow from others: of a room that is also reached by way of another one."""
    below = {name: reachable(name, graph) for name in graph}
    return {
        name: {other for other in others if not any(other in below[third] for third in others - {other})}
        for name, others in graph.items()
    }
