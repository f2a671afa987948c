"""Objects of the user's own, named as `module:name`."""

import importlib
import os
import re
import sys
from typing import Any

from fedtailor._common.errors import FedtailorError, brief

CODE = re.compile(r"object:.+|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # a name of code
GIVEN = ("object:", "__main__:")  # begins the name of an object that only the program has that gave it


def import_object(spec: str, kind: str) -> Any:
    """The object that `module:name` names; modules in the current directory count."""
    module_name, _, attribute = spec.partition(":")
    given = FedtailorError(
        f"No import finds the {kind} {spec!r}, which was an object in a Python program: go on there, by the same call."
    )
    if module_name == "object":
        raise given
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise FedtailorError(f"The {kind} {spec!r} cannot be imported: {brief(error)}.") from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        if module_name == "__main__":
            raise given from None
        raise FedtailorError(
            f"There is no {attribute!r} in the module {module_name!r} (for the {kind} {spec!r})."
        ) from None
    return found


def object_name(thing: Any) -> str:
    """Name an object of the user's for an experiment file: `module:name` where that finds this very object, and
    `object:name` where only Python can pass it again."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    found = sys.modules.get(str(module))
    for part in str(name).split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else f"object:{name or type(thing).__qualname__}"
