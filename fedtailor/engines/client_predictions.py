"""What the model of a run's client makes of samples that a user gives."""

from typing import Any

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError, warn
from fedtailor.data import Dataset
from fedtailor.data.raw_samples import RawFormat
from fedtailor.engines.simulation import Simulation
from fedtailor.training.inputs import Inputs, Several, sample_shape, shape_words
from fedtailor.training.layers import takes_integers
from fedtailor.training.predictions import Predictions, features, names_of


def predictions(run: Simulation, client: int, x: Any) -> Predictions:
    """Predict with a client's personal model; the labels of its own test samples are known."""
    data, outputs = run.data, run.predict(client, _inputs(run, client, x))
    counted = len(data.own_names[client]) if data.own_names else len(data.classes)
    labels = names_of(data.test(client)[1], data.classes_of(client)) if x is None else []
    return Predictions(outputs, data.classes_of(client)[:counted], labels, data.targets == "labels")


def body_outputs(run: Simulation, client: int, x: Any) -> Tensor:
    """Compute the features by a client's personal model."""
    found = features(run.terms.network, run.personal_model(client), _inputs(run, client, x))
    if found is None:
        raise FedtailorError("The network cannot be cut before its head, so it has no features: name another --head.")
    return found


def _inputs(run: Simulation, client: int, x: Any) -> Inputs:
    """Make inputs of samples as the run's data were given; of None, the client's test samples."""
    data, experiment = run.data, run.experiment
    if data.elsewhere is not None:
        raise FedtailorError("The clients of this run are sites, and so are their models: predict there.")
    if x is None:
        inputs: Inputs = data.test(client)[0]
    else:
        format = RawFormat(
            table=data.preprocessing_of(client),
            pixels=experiment.pixels,
            dtype=getattr(torch, experiment.dtype),
            whole=takes_integers(run.terms.network.module),
            several=isinstance(data.x, Several),
            regression=not data.classes,
            roles={"label_column": experiment.label_column, "client_column": experiment.client_column},
        )
        given = x if isinstance(x, Dataset) else format.dataset(x)
        inputs, notes = format.select(given, torch.ones(len(given), dtype=torch.bool))
        for note in (*given.notes, *notes):
            warn(note)
        if sample_shape(inputs) != sample_shape(data.x):
            found, wanted = shape_words(sample_shape(inputs)), shape_words(sample_shape(data.x))
            raise FedtailorError(f"The samples have the shape {found}, but the run's have {wanted}.")
    if len(inputs) == 0:
        raise FedtailorError(f"There are no samples: client {data.names[client]} has none for testing, so give some.")
    return inputs.to(data.y.device)
