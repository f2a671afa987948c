"""`fedtailor methods`, `models` and `data`."""

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedtailor.cli.display import definition_table, out, plain_table
from fedtailor.cli.options import experiment_options
from fedtailor.errors import FedtailorError
from fedtailor.experiment import make_experiment

if TYPE_CHECKING:
    from fedtailor.data import FederatedData

Json = Annotated[bool, typer.Option("--json", help="for programs")]
SHADES = " ░▒▓█"  # no sample of a class, up to the client's most frequent one
MOST_SHADES = 50  # shades in a row: neighbouring classes share one where there are more


def _print_json(value: Any) -> None:
    typer.echo(json_format.dumps(value, indent=2, ensure_ascii=False))


def methods(json: Json = False) -> None:
    """List the methods with their parameters."""
    from fedtailor.methods import all_methods

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": (method.__doc__ or "").split("\n")[0],
            "parameters": {
                key: {"default": getattr(method, key), "description": field.description}
                for key, field in type(method).model_fields.items()
            },
            "paper": method.paper,
        }
        for name, method in all_methods().items()
    ]
    if json:
        _print_json(rows)
        return
    cells = [
        (
            row["name"],
            row["summary"],
            "\n".join(f"{key}={p['default']}: {p['description']}" for key, p in row["parameters"].items()),
        )
        for row in rows
    ]
    out.print(definition_table("Methods", ("name", "what it does", "parameters (--set name=value)"), cells))
    out.print("Your own: a subclass of fedtailor.Method, named as module:Class.", highlight=False)


def models(json: Json = False) -> None:
    """List the networks."""
    from fedtailor.local.network import Network
    from fedtailor.models import CATALOGUE, build_model

    shapes = {"28×28": (1, 28, 28), "32×32 colour": (3, 32, 32)}
    rows: list[dict[str, Any]] = [
        {
            "name": info.name,
            "description": info.description,
            "parameters": {
                label: Network(build_model(info.name, shape, 10, 0)).parameters for label, shape in shapes.items()
            },
        }
        for info in CATALOGUE.values()
    ]
    if json:
        _print_json(rows)
        return
    cells = [(r["name"], r["description"], *(f"{count:,}" for count in r["parameters"].values())) for r in rows]
    columns = ("name", "network", *(f"parameters, {label}, 10 classes" for label in shapes))
    out.print(definition_table("Models", columns, cells))
    out.print("Your own: an nn.Module, named as module:Class.", highlight=False)


@experiment_options("Data")
def data(
    settings: dict[str, Any],
    data: Annotated[
        str | None, typer.Argument(metavar="NAME", help="a data set, to see how it is dealt", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the partition")] = 0,
    json: Json = False,
) -> None:
    """List the data sets; with a NAME, show how it is dealt to clients: how many samples of each class each has.

    [bold]Examples[/]

    fedtailor data

    fedtailor data digits --clients 10 --partition dirichlet:0.3
    """
    directory = settings.get("data_dir")
    if data is None:
        if len(settings) > (directory is not None):
            raise FedtailorError("These options say how a data set is dealt: name one, as in `fedtailor data digits`.")
        _list_data(directory, json)
        return
    from fedtailor.server.record import describe
    from fedtailor.simulation import deal_data

    dealt = deal_data(make_experiment({**settings, "data": data, "seed": seed}))
    if json:
        _print_json(describe(dealt))
    else:
        _show_partition(dealt)


def _list_data(directory: str | None, json: bool) -> None:
    from fedtailor.data import catalogue, data_dir, found, partitions_catalogue

    rows = [
        {
            "name": info.name,
            "description": info.description,
            "classes": info.classes,
            "bundled": info.bundled,
            "found": info.bundled or found(info, directory),
            "files": list(info.files),
            "source": info.source,
        }
        for info in catalogue()
    ]
    if json:
        _print_json({"data": rows, "partitions": partitions_catalogue()})
        return
    cells = [
        (
            row["name"],
            f"{row['description']}, {row['classes']} classes",
            "bundled" if row["bundled"] else "yes" if row["found"] else "no",
        )
        for row in rows
    ]
    title = f"Data sets (files are looked for in {data_dir(directory)}; a missing one says where to get it)"
    out.print(definition_table(title, ("name", "what it is", "there"), cells))
    out.print(definition_table("Partitions", ("--partition", "who gets what"), list(partitions_catalogue().items())))
    out.print(
        "Your own: the path of an .npz (x, y, client), a .csv, or a folder of client/class/image.",
        highlight=False,
    )


def _show_partition(dealt: "FederatedData") -> None:
    """The class table with its shading: a row a client, darker where more of its samples are."""
    splits = ("train", "validation", "test")
    counts, sizes = dealt.counts(), [dealt.counts(split).sum(1).tolist() for split in splits]
    pieces = min(counts.shape[1], MOST_SHADES)
    counted = 28 + pieces + 4 * len(dealt.classes) <= out.width  # otherwise the shading alone
    table = plain_table(f"{dealt.name}: {len(dealt.y):,} samples, {dealt.clients} clients")
    table.add_column("client", style="bold", no_wrap=True, max_width=28)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("shading", no_wrap=True, min_width=pieces)
    for name in (dealt.classes or ("samples",)) if counted else ():
        table.add_column(escape(name), justify="right", max_width=8, no_wrap=True)
    for client, row in enumerate(counts.tolist()):
        shades = [sum(row[len(row) * k // pieces : len(row) * (k + 1) // pieces]) for k in range(pieces)]
        shading = "".join(SHADES[-(-(len(SHADES) - 1) * count // max(shades))] for count in shades)
        name = escape(dealt.names[client]) + (" (new)" if client in dealt.new else "")
        numbers = [str(count or "·") for count in row] if counted else []
        table.add_row(name, "+".join(str(size[client]) for size in sizes), shading, *numbers)
    out.print(table)
    out.print("Samples to train, to validate and to test. The shading has a shade a class.", highlight=False)
