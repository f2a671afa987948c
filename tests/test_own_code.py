"""Names of objects: `module:name` where an import finds the very object, else `object:name`."""

import functools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor._common.imports import import_object, object_name
from fedtailor.engines.own_code import only_in_python
from fedtailor.experiment import make_experiment


def function() -> None:
    """Found by an import."""


class Kind:
    """So is this one, and what is inside of it."""

    class Inner:
        pass

    def bound(self) -> None:
        pass


wrapped = functools.wraps(function)(lambda: None)  # calls itself `function`, which it is not
HERE = __name__


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (function, f"{HERE}:function"),
        (Kind, f"{HERE}:Kind"),
        (Kind.Inner, f"{HERE}:Kind.Inner"),
        (torch.nn.Linear, "torch.nn.modules.linear:Linear"),
        (Kind(), "object:Kind"),
        (Kind().bound, "object:Kind.bound"),
        (wrapped, "object:function"),
        (functools.partial(function), "object:partial"),
        (lambda: None, "object:<lambda>"),
        ([], "object:list"),
    ],
)
def test_a_name_is_one_by_which_an_import_finds_the_object(thing: Any, name: str) -> None:
    assert object_name(thing) == name
    if not name.startswith("object:"):
        assert import_object(name, "thing") is thing


def test_a_class_that_was_defined_anew_is_not_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a notebook's cell runs again, or a module is reloaded."""
    module = ModuleType("tests_anew")
    monkeypatch.setitem(sys.modules, "tests_anew", module)
    code = "import fedtailor as ft\nclass Mine(ft.Method):\n    def train(self, client, message):\n        return {}\n"
    exec(code, vars(module))
    old = module.Mine
    assert object_name(old) == "tests_anew:Mine"
    exec(code, vars(module))
    assert object_name(old) == "object:Mine"
    assert object_name(module.Mine) == "tests_anew:Mine"
    with pytest.raises(ft.FedtailorError, match="The class Mine is not what its module has by this name: move it out"):
        ft.compare([old], rounds=1)


@pytest.mark.parametrize("name", ["object:Net", "object:<lambda>", "__main__:NoSuchName"])
def test_what_only_a_program_has_is_found_by_no_import(name: str) -> None:
    with pytest.raises(ft.FedtailorError) as refused:
        import_object(name, "model")
    assert str(refused.value) == (
        f"No import finds the model {name!r}, which was an object in a Python program: go on there, by the same call."
    )


def test_the_record_has_the_short_names_of_what_no_import_finds() -> None:
    model = object_name(lambda: lambda: None)
    loss = object_name((lambda: lambda: None)())
    assert (
        loss == "object:test_the_record_has_the_short_names_of_what_no_import_finds.<locals>.<lambda>.<locals>.<lambda>"
    )
    note = only_in_python([make_experiment({"model": model, "loss": loss})])
    assert note.endswith("no import finds the model object:<lambda>, the loss object:<lambda>.")
