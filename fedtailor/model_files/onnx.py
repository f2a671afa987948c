"""Networks as ONNX, for use without PyTorch, with any batch size. Needs the extra `onnx`."""

import copy
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError, brief
from fedtailor._common.extras import install_command
from fedtailor.data.preprocessing import Preprocessing
from fedtailor.training.inputs import Held, tensors


class OnnxNetwork:
    """A network's graph, traced once, into which the values of many models are put."""

    def __init__(self, module: nn.Module, sample: Held, table: Preprocessing | None = None) -> None:
        for name in ("onnx", "onnxscript"):
            if importlib.util.find_spec(name) is None:
                raise FedtailorError(f"ONNX needs two more packages: install them with {install_command('onnx')}.")
        self.module, self.sample = copy.deepcopy(module).eval(), sample
        if table is not None:
            self.module, self.sample = OfTable(self.module, table), torch.zeros(1, len(table.columns)).double()
        self._graph: Any = None

    def bytes(self, state: Mapping[str, Tensor], description: str, table: Preprocessing | None = None) -> bytes:
        """Make the file of a model: this state dict, with the description among its properties. The preprocessing of a
        table is part of the graph, which takes its columns as they are: numbers, categories by their number, NaN."""
        from onnx import helper, numpy_helper

        if table is not None:
            state = {**{f"network.{name}": tensor for name, tensor in state.items()}, **_constants(table)}
        if self._graph is None or not _names(state) <= {entry.name for entry in self._graph.graph.initializer}:
            self.module.load_state_dict(state)
            self._graph = _traced(self.module, self.sample)
        for entry in self._graph.graph.initializer:
            if entry.name in state:
                entry.CopyFrom(numpy_helper.from_array(state[entry.name].numpy(), entry.name))
        helper.set_model_props(self._graph, {"fedtailor": description})
        written: bytes = self._graph.SerializeToString()
        return written


class OfTable(nn.Module):
    """A network behind the preprocessing of a table, in plain PyTorch."""

    numbers: Tensor
    flags: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, network: nn.Module, table: Preprocessing) -> None:
        super().__init__()
        self.network, self.dtype = network, next(network.parameters()).dtype
        self.categories = [(place, len(table.columns[place].values)) for place in table.categories]
        self.flagged = {place for place, column in enumerate(table.columns) if column.missing}
        for name, places in (("numbers", table.numbers), ("flags", table.flagged)):
            self.register_buffer(name, torch.tensor(places, dtype=torch.int64), persistent=False)
        for name, values in _constants(table).items():
            self.register_buffer(name, values)

    def forward(self, x: Tensor) -> Tensor:
        pieces = []
        if len(self.numbers):
            scaled = (x.index_select(1, self.numbers) - self.mean) / self.scale
            pieces.append(torch.where(scaled.isnan(), torch.zeros_like(scaled), scaled))
        if len(self.flags):
            pieces.append(x.index_select(1, self.flags).isnan())
        for place, count in self.categories:
            codes = x[:, place : place + 1]
            pieces.append(codes == torch.arange(count, dtype=x.dtype))
            pieces += [codes.isnan()] if place in self.flagged else []
        out: Tensor = self.network(torch.cat([piece.to(x.dtype) for piece in pieces], dim=1).to(self.dtype))
        return out


def _constants(table: Preprocessing) -> dict[str, Tensor]:
    of = [table.columns[place] for place in table.numbers]
    values = {"mean": [column.mean for column in of], "scale": [column.scale for column in of]}
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in values.items() if numbers}


def _names(state: Mapping[str, Tensor]) -> set[str]:
    """List the tensors that a model's graph must have: all but BatchNorm's counters, which predict nothing."""
    return {name for name, tensor in state.items() if tensor.is_floating_point()}


def _traced(module: nn.Module, sample: Held) -> Any:
    """Trace a network's ONNX graph. It is not optimised, so that every parameter is found in it under its name; and the
    notes on where in this machine's files each node comes from are removed."""
    examples = tuple(part.cpu().expand(2, *part.shape[1:]).contiguous() for part in tensors(sample))
    names = ["x"] if len(examples) == 1 else [f"x{number}" for number in range(1, len(examples) + 1)]
    batch = torch.export.Dim("batch")
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                examples,
                input_names=names,
                output_names=["outputs"],
                dynamic_shapes=tuple({0: batch} for _ in examples),
                dynamo=True,
                optimize=False,
                verbose=False,
            )
            graph: Any = program.model_proto  # type: ignore[union-attr]
    except Exception as error:  # whatever the exporter cannot do
        raise FedtailorError(f"This network cannot be written as ONNX ({brief(error)}).") from error
    for part in (graph.graph, *graph.graph.node, *graph.graph.value_info, *graph.graph.input, *graph.graph.output):
        del part.metadata_props[:]
    return graph


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which reports its internals in warnings and in the log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
