"""`fedtailor doctor`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedtailor.cli import Json
from fedtailor.cli.display import human_bytes, marked, out, print_json, visible, working

if TYPE_CHECKING:
    from fedtailor.cli.diagnosis import Facts

BROKEN = 1  # exit code: fedtailor cannot be used as it is


def doctor(
    json: Json = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="compare this device (cuda, mps) with the CPU, and nothing else"),
    ] = None,
) -> None:
    """Look at this installation and this machine: what a bug report needs.

    Versions, cores, memory, devices, extras, data sets, where can be written, and a second of benchmark. What is wrong
    is said with what to do about it. Exit code 0: fedtailor can be used here; 1: it cannot.

    It tells nothing personal: home directories are written as ~, and no name of a user or a machine is in it. Nothing
    is sent or recorded.

    With --device, three small networks train for a round on that device and on the CPU, one client after the other and
    ten as one computation (--stack): the models must agree to 1e-4.

    For the kit of a site in a federation there is another command: fedtailor deploy doctor.

    [bold]Examples[/]
      fedtailor doctor
      fedtailor doctor --json > doctor.json
      fedtailor doctor --device cuda
    """
    if device is not None:
        _compare(device, json)
        return
    from fedtailor.cli.diagnosis import examine

    with working("looking"):
        facts, problems = examine()
    if json:
        print_json(facts)
    else:
        _show(facts)
        for problem in problems:
            label = ("Broken:", "bold red") if problem.serious else ("Problem:", "yellow")
            out.print(marked(*label, problem.text), soft_wrap=not out.is_terminal)
        if not problems:
            out.print("No problems were found.", style="green")
    if any(problem.serious for problem in problems):
        raise typer.Exit(BROKEN)


def _compare(device: str, json: bool) -> None:
    """Compare a device with the CPU."""
    from fedtailor.cli.device_check import CLOSE, check_device

    with working("training on both"):
        found = check_device(device)
    agree = [one["difference"] <= CLOSE for one in found]
    if json:
        print_json(found)
    else:
        table = Table("network", "clients at once", "from the CPU's model", "operators a step", "samples a second")
        for one, close in zip(found, agree, strict=True):
            difference = Text(f"{one['difference']:.1e}", "green" if close else "bold red")
            speed = f"{one['samples_per_second']:,}"
            table.add_row(one["model"], str(one["stack"]), difference, str(one["operators_per_step"]), speed)
        out.print(table)
        if all(agree):
            out.print(f"The device {device} agrees with the CPU to {CLOSE:.0e}.", style="green")
        else:
            why = f"The device {device} differs from the CPU by more than {CLOSE:.0e}: do not trust its numbers."
            out.print(marked("Broken:", "bold red", why), soft_wrap=not out.is_terminal)
    if not all(agree):
        raise typer.Exit(BROKEN)


def _show(facts: "Facts") -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, lines in _lines(facts).items():
        table.add_row(title, Text("\n".join(visible(line) for line in lines)))
    out.print(table)
    out.print()


def _lines(facts: "Facts") -> dict[str, list[str]]:
    """Write the facts in words, by title."""
    commit = f" (commit {facts['commit']})" if facts["commit"] else ""
    said = {
        "fedtailor": [f"{facts['fedtailor']}{commit}"],
        "Python": [facts["python"]],
        "packages": [", ".join(_versioned(name, one["version"]) for name, one in facts["packages"].items())],
        "extras": [_extra(name, about) for name, about in facts["extras"].items()],
        "system": [facts["system"]],
        "processor": [facts["processor"] or "unknown"],
        "cores": [_cores(facts)],
        "memory": [_memory(facts["memory"])],
        "disk": [_place(place) for place in facts["places"]],
    }
    if facts["devices"]:
        cuda, mps = facts["devices"]["cuda"], facts["devices"]["mps"]
        said["devices"] = [", ".join(["cpu", *(f"cuda ({name})" for name in cuda), *(["mps"] * mps)])]
    if facts["engines"]:
        here = ", ".join(name for name, why_not in facts["engines"].items() if why_not is None)
        said["engines"] = [here, *(f"{name}: {why}" for name, why in facts["engines"].items() if why is not None)]
    if facts["data"]:
        said["data sets"] = _data(facts["data"])
    if facts["benchmark"]:
        speed = facts["benchmark"]
        said["speed"] = [f"{speed['samples_per_second']:,} training samples a second ({speed['what']})"]
    return said


def _versioned(name: str, version: str | None) -> str:
    return f"{name} {version}" if version else f"{name} is missing"


def _extra(name: str, about: dict[str, Any]) -> str:
    if about["install"]:
        return f"{name}: not installed: {about['install']}"
    return f"{name}: {', '.join(_versioned(*one) for one in about['packages'].items())}"


def _cores(facts: "Facts") -> str:
    cores = facts["cores"]
    said = [f"{cores['usable']} usable of {cores['machine']}"]
    if cores["container_limit"] is not None:
        said.append(f"the container may use {cores['container_limit']:g}")
    if facts["devices"]:
        said.append(f"PyTorch has {facts['devices']['threads']} threads")
    return ", ".join([*said, *(f"{name}={value}" for name, value in cores["environment"].items())])


def _memory(memory: dict[str, int | None]) -> str:
    words = {"total": "", "available": " available", "container_limit": " for the container"}
    known = [f"{human_bytes(size)}{words[name]}" for name, size in memory.items() if size is not None]
    return ", ".join(known) or "unknown"


def _place(place: dict[str, Any]) -> str:
    free = "" if place["free"] is None else f"{human_bytes(place['free'])} free, "
    return f"{place['for']}: {place['path']}, {free}{'can' if place['writable'] else 'cannot'} be written"


def _data(data: dict[str, Any]) -> list[str]:
    there = ", ".join(data["found"]) or "none"
    missing = f"; {len(data['missing'])} more are known" if data["missing"] else ""
    return [f"bundled: {', '.join(data['bundled'])}", f"in {data['directory']}: {there}{missing}"]
