"""Predictions with a model file: on arrays, on any data set, or on the samples of a run's clients."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch

from fedtailor._common.errors import FedtailorError, brief, unknown, warn
from fedtailor.data import Dataset
from fedtailor.data import load as load_data
from fedtailor.data.agreement import FILE as FEDERATION
from fedtailor.data.client_data import SPLITS
from fedtailor.data.dataset import TEST, TRAIN, VALIDATION
from fedtailor.data.raw_samples import RawFormat
from fedtailor.data.sources import columns_in
from fedtailor.data.table import TableSettings
from fedtailor.engines.joins import run_data
from fedtailor.engines.own_code import named_code
from fedtailor.engines.runs import load
from fedtailor.model_files.format import built, read_model
from fedtailor.models import ModelLike
from fedtailor.training.descent import EVALUATION_BATCH
from fedtailor.training.inputs import Inputs, apply, join, sample_shape, shape_words
from fedtailor.training.isolation import isolated
from fedtailor.training.layers import takes_integers
from fedtailor.training.predictions import Predictions, names_of

PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


@dataclass(frozen=True)
class Samples:
    """Inputs, the names of their classes where these are known, and notes for the user."""

    inputs: Inputs
    labels: list[str]
    notes: list[str] = field(default_factory=list)


@isolated()
def predict(path: str | Path, x: Any, model: ModelLike | None = None) -> Predictions:
    """Predict with a model file. `x` is an array, tensor or table (samples, …) of features, or of uint8 pixels; or the
    path of a file or the name of a data set, as on the command line; or a data set that `load_data` returned.

    A model that was trained on a table takes a pandas table or a dictionary with the same columns in any order, or an
    array with them in the trained order. `model` is the network, for those that a file alone cannot bring along (see
    `load_model`).
    """
    reader = Model(path, model)
    samples = reader.of_data(reader.dataset(x))
    for note in samples.notes:
        warn(note)
    return reader.predict(samples.inputs, samples.labels)


class Model:
    """A model file, loaded to predict with."""

    def __init__(self, path: str | Path, model: ModelLike | None = None) -> None:
        self.path = path
        self.about, state = read_model(path)
        self.module = built(path, self.about, state, model)

    @cached_property
    def format(self) -> RawFormat:
        """The way from raw samples to inputs, as it was in training."""
        about = self.about
        return RawFormat(
            table=about.table,
            pixels=about.pixels,
            dtype=getattr(torch, about.dtype),
            whole=takes_integers(self.module),
            several=isinstance(about.input_shape[0], tuple),
            regression=not about.classes,
            roles=self._roles(),
        )

    def dataset(self, x: Any) -> Dataset:
        """Make a data set of a Python object, or load the one that it names."""
        if isinstance(x, Dataset):
            return x
        if isinstance(x, str | Path):
            return self.load(str(x), None)
        return self.format.dataset(x)

    def load(
        self, data: str, data_dir: str | None, image_size: int | None = None, **settings: Unpack[TableSettings]
    ) -> Dataset:
        """Load a data set, with labels or without. The label and client columns of a table are those that are given, or
        else those of the table that the model was trained on, where this one has them too."""
        table = self.about.table
        columns = {**columns_in(data, data_dir, self._roles(), settings), **settings}
        return load_data(
            data,
            data_dir,
            image_size=image_size,
            labelled=False,
            regression=not self.about.classes,
            knows=table.kinds() if table else None,
            **columns,  # type: ignore[arg-type]
        )

    def _roles(self) -> dict[str, str | None]:
        return {"label_column": self.about.label_column, "client_column": self.about.client_column}

    def predict(self, x: Inputs, labels: list[str] | None = None) -> Predictions:
        """Predict the classes (or numbers) of inputs."""
        if len(x) == 0:
            raise FedtailorError("There are no samples to predict: choose another client or part.")
        if sample_shape(x) != self.about.input_shape:
            given, wanted = map(shape_words, (sample_shape(x), self.about.input_shape))
            raise FedtailorError(
                f"The samples have the shape {given}, but the model {self.path} was made for {wanted}."
            )
        with isolated(), torch.no_grad():
            try:
                outputs = torch.cat([apply(self.module, piece) for piece in x.split(EVALUATION_BATCH)])
            except Exception as error:  # a network of the user's own may do anything
                raise FedtailorError(
                    f"The network of {self.path} cannot take these samples ({brief(error)})."
                ) from error
        if outputs.numel() != len(x) * self.about.outputs:
            raise FedtailorError(
                f"The network of {self.path} gives {outputs.numel()} values for {len(x)} samples, not the "
                f"{self.about.outputs} for each that its description says."
            )
        outputs = outputs.reshape(len(x), -1)[:, : self.about.counted]
        if len(bad := (~torch.isfinite(outputs)).any(1).nonzero()):
            raise FedtailorError(
                f"The model {self.path} gives NaN or Inf for {len(bad)} of {len(x)} samples, the first is sample "
                f"{int(bad[0])}: its training diverged, or the samples are not of the kind it was trained on."
            )
        return Predictions(outputs, self.about.classes, labels or [], self.about.multi_label)

    def of_data(self, data: Dataset, client: str | None = None, part: str | None = None) -> Samples:
        """Select a data set's samples: all, or those of one client or one part (train, validation, test)."""
        chosen = torch.ones(len(data), dtype=torch.bool)
        if client is not None:
            if data.client is None:
                raise FedtailorError(f"The data set {data.name!r} names no clients: leave --client out.")
            if client not in data.client_names:
                raise unknown("client", client, data.client_names)
            chosen &= data.client == data.client_names.index(client)
        if part is not None:
            if data.part is None:
                raise FedtailorError(f"The data set {data.name!r} has no official split: leave --part out.")
            chosen &= data.part == PARTS[_known(part)]
        names = names_of(data.y[chosen], data.classes)
        notes = list(data.notes)
        inputs, more = self.format.select(data, chosen)
        return Samples(inputs, names, [*notes, *more])

    def of_run(
        self, path: Path, client: str | None = None, part: str | None = None, data_dir: str | None = None
    ) -> Samples:
        """Select the samples of a run's clients: of all clients or one of them, all their samples or one part."""
        result = load(path)
        if (path / FEDERATION).is_file():
            raise FedtailorError(f"The samples of the run in {path} are at its sites: predict there, with --data.")
        code = named_code(result.experiment)
        if own := [name for kind, name in code.items() if kind in ("data", "partition")]:
            raise FedtailorError(
                f"The samples of the run in {path} are made or partitioned by code of its own ({own[0]}), which is not "
                "run here: give the samples with --data."
            )
        here = data_dir or result.experiment.data_dir
        changes = {"data_dir": here, "pixels": self.about.pixels, "dtype": self.about.dtype}
        data = run_data(result.partition["joined"], result.experiment.model_copy(update=changes))
        first, last = SPLITS["all" if part is None else _known(part)]
        pieces, names = [], []
        for number in range(data.n_clients) if client is None else [result.number_of(client)]:
            start, end = data.places[number, [first, last]].tolist()
            pieces.append(data.x[start:end])
            classes = data.classes_of(number)
            names += names_of(data.y[start:end], classes)
        known, theirs = self.about.table, data.preprocessing
        if known is not None and (theirs is None or theirs.feature_names != known.feature_names):
            raise FedtailorError(f"The table of the run {path} has other columns than that of the model {self.path}.")
        return Samples(self.format.inputs(join(pieces)), names)


def _known(part: str) -> str:
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    return part
