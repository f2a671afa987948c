"""The features of a table, for `fedtailor data`: what each column is, its range, missing cells, client by client."""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedtailor._common.errors import unknown
from fedtailor.cli.display import data_lines, out, plain_table, say, table_of, visible

if TYPE_CHECKING:
    from fedtailor.data import Dataset, FederatedData
    from fedtailor.data.preprocessing import ColumnFacts

SHOWN = 6  # values of a category
CELL = 14  # characters of a client's cell
MOST_CLIENTS = 30
_OF_TARGETS = ("mean", "std", "min", "max")


def describe_features(dataset: "Dataset", federated: "FederatedData") -> dict[str, Any]:
    """Describe a table's columns as plain values: over all samples, and what each client declares of its training
    samples."""
    clients = {
        name: [one.model_dump(mode="json") for one in facts]
        for name, facts in zip(federated.names, federated.facts, strict=True)
    }
    about = {"columns": _columns(dataset), "ignored": list(dataset.ignored), "notes": list(federated.notes)}
    return {**about, "by_client": clients}


def show_features(dataset: "Dataset", federated: "FederatedData", client: str | None = None) -> None:
    """Print a table's columns, and the clients' side by side; with a `client`, all columns of that one."""
    if client is not None:
        _show_client(federated, client)
        return
    rows = [(visible(c["name"]), c["kind"], _values(c), str(c["missing"] or "·")) for c in _columns(dataset)]
    rows += [(visible(name), "ignored", "", "") for name in dataset.ignored]
    title, head = f"Columns of {dataset.name}: {len(dataset):,} samples", ("column", "type", "values", "missing")
    out.print(table_of(title, head, rows, left=head[:3]))
    for line in data_lines([federated])[1:]:
        say(line)
    _show_clients(federated)


def describe_targets(federated: "FederatedData") -> dict[str, list[dict[str, float]]]:
    """Describe the numbers to predict: each client's mean, standard deviation and range, one entry a target."""
    found = {}
    for name, (start, *_, end) in zip(federated.names, federated.places, strict=True):
        y = federated.y[start:end].double().numpy()
        found[name] = [
            {what: float(getattr(values, what)()) for what in _OF_TARGETS} for values in y.reshape(len(y), -1).T
        ]
    return found


def show_targets(federated: "FederatedData") -> None:
    """Print each client's samples, and the mean, standard deviation and range of the numbers to predict."""
    samples, several = int(federated.bounds.diff(dim=1).sum()), federated.n_outputs > 1
    rows = []
    for (name, targets), sizes in zip(
        describe_targets(federated).items(), federated.bounds.diff(dim=1).tolist(), strict=True
    ):
        for place, target in enumerate(targets):
            client = f"{visible(name)}{' (new)' if federated.names.index(name) in federated.new else ''}"
            which = [str(place)] if several else []
            rows.append([client, "+".join(map(str, sizes)), *which, *(f"{value:.6g}" for value in target.values())])
    title = f"{federated.name}: {samples:,} samples, {federated.n_clients} clients"
    out.print(table_of(title, ("client", "samples", *(["target"] if several else []), *_OF_TARGETS), rows))
    out.print("Samples: training + validation + test. Numbers to predict: mean, standard deviation and range of all.")


def _columns(dataset: "Dataset") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for values, column in zip(dataset.cells.numpy().T, dataset.columns, strict=True):
        present = values[~np.isnan(values)]
        about = {"name": column.name, "kind": column.kind, "missing": len(values) - len(present)}
        if column.kind == "category":
            times = np.bincount(present.astype(np.int64), minlength=len(column.values)).tolist()
            found.append({**about, "values": dict(zip(column.values, times, strict=True))})
        else:
            numbers = (float(of(present)) if len(present) else None for of in (np.min, np.mean, np.max))
            found.append({**about, **dict(zip(("min", "mean", "max"), numbers, strict=True))})
    return found


def _values(column: dict[str, Any]) -> str:
    if column["kind"] == "number":
        return " … ".join("–" if column[key] is None else f"{column[key]:.6g}" for key in ("min", "mean", "max"))
    often = sorted(column["values"].items(), key=lambda item: -item[1])
    words = ", ".join(f"{visible(value)} ({times})" for value, times in often[:SHOWN])
    return words + (f" and {len(often) - SHOWN} more" if len(often) > SHOWN else "")


def _show_clients(federated: "FederatedData") -> None:
    """Print the clients' training samples side by side, as many columns as the page has room for."""
    room = max(1, (out.width - 20) // CELL)
    of_all = federated.preprocessing.columns if federated.preprocessing else ()
    table = plain_table("Training samples of each client")
    table.add_column("client", style="bold", no_wrap=True, max_width=18)
    for column in of_all[:room]:
        table.add_column(visible(column.name), justify="right", no_wrap=True, max_width=CELL - 1)
    for name, facts in list(zip(federated.names, federated.facts, strict=True))[:MOST_CLIENTS]:
        table.add_row(visible(name), *(_brief(one) for one in facts[:room]))
    out.print(table)
    more = len(of_all) > room or federated.n_clients > MOST_CLIENTS
    rest = " --client NAME shows all columns of one client." if more else ""
    out.print(f"Mean of a number, or how many values a category has; missing cells in brackets.{rest}")


def _brief(facts: "ColumnFacts") -> str:
    mean = f"{facts.mean:.6g}" if facts.count else "–"
    missing = f" ({facts.missing})" if facts.missing else ""
    return (mean if facts.kind == "number" else str(len(facts.values))) + missing


def _show_client(federated: "FederatedData", client: str) -> None:
    if client not in federated.names:
        raise unknown("client", client, federated.names)
    rows, head = [], ("column", "type", "mean ± std, or values", "missing")
    for one in federated.facts[federated.names.index(client)]:
        deviation = (one.squares / max(one.count, 1)) ** 0.5
        number = f"{one.mean:.6g} ± {deviation:.4g}" if one.count else "–"
        values = number if one.kind == "number" else ", ".join(map(visible, one.values))
        rows.append((visible(one.name), one.kind, values, str(one.missing or "·")))
    out.print(table_of(f"Training samples of {client}", head, rows, left=head[:3]))
