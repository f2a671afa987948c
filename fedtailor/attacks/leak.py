"""The function `fedtailor.leak`, like the command."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from fedtailor._common.errors import FedtailorError
from fedtailor.attacks.inversion import Attack, Inversion
from fedtailor.attacks.leakage import Leakage
from fedtailor.attacks.study import Question, Study
from fedtailor.data import Clients, Dataset
from fedtailor.engines.runs import importable_name, names_and_objects
from fedtailor.experiment import Settings, make_experiment
from fedtailor.method import Method
from fedtailor.models import ModelLike


def leak(
    methods: str | type[Method] | Sequence[str | type[Method]],
    *,
    inversion: Inversion = "cosine",
    samples: int = 1,
    victims: int = 1,
    round: int = 1,
    iterations: int | None = None,
    restarts: int = 1,
    tv: float = 1e-3,
    unroll: int = 10,
    method_parameters: Mapping[str | type[Method], Mapping[str, Any]] | None = None,
    data: str | Path | Dataset | Clients = "digits",
    model: ModelLike = "mlp",
    out: str | Path | None = None,
    **settings: Unpack[Settings],
) -> Leakage:
    """Reconstruct clients' training samples from what methods really upload, as a curious server could.

    The federation runs up to `round`; in it, the first `victims` participants have so many training `samples` each.
    The server knows the network, the experiment, what it sent and what came back. `inversion` is "dlg", "idlg",
    "cosine" or "analytic"; of several `restarts`, the best match counts; `tv` is the weight of the total variation
    (cosine). The attack follows a client's steps one by one, up to `unroll` of them. `out` is a directory for the
    record and a picture. `print(…)` shows the table.
    """
    if "parameters" in settings:
        raise FedtailorError("Methods have parameters of their own: give method_parameters={method: {…}}.")
    names, objects = names_and_objects(data, model, "cross-entropy")
    own = {importable_name(method): dict(given) for method, given in (method_parameters or {}).items()}
    asked = [importable_name(method) for method in ([methods] if isinstance(methods, str | type) else methods)]
    each = [{**names, "method": name, "parameters": own.get(name, {}), **settings} for name in asked]
    question = Question(Attack(inversion, iterations, restarts, tv), samples, victims, round, unroll)
    found = Study([make_experiment(one) for one in each], question, objects).run()
    if out is not None:
        found.write(Path(out))
    return found
