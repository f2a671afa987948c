"""Objects of the user's own, named as `module:name`."""

import importlib
import os
import sys
from typing import Any

from fedtailor._common.errors import FedtailorError, brief


def import_object(spec: str, kind: str) -> Any:
    """The object that `module:name` names; modules in the current directory count."""
    module_name, _, attribute = spec.partition(":")
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
        raise FedtailorError(
            f"There is no {attribute!r} in the module {module_name!r} (for the {kind} {spec!r})."
        ) from None
    return found


def object_name(thing: Any) -> str:
    """Name an object of the user's for an experiment file: `module:name`, or `object:Class` where only
    Python can pass it again."""
    name = getattr(thing, "__qualname__", None)
    module = getattr(thing, "__module__", None)
    if name is None or module is None or "<" in name:
        return f"object:{name or type(thing).__qualname__}"
    return f"{module}:{name}"
