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

from fedtailor.errors import FedtailorError, brief
from fedtailor.local.inputs import Held, tensors


class OnnxNetwork:
    """A network's graph, traced once, into which the values of many models are put."""

    def __init__(self, module: nn.Module, sample: Held) -> None:
        for name in ("onnx", "onnxscript"):
            if importlib.util.find_spec(name) is None:
                raise FedtailorError("ONNX needs two more packages: install them with pip install 'fedtailor[onnx]'.")
        self.module, self.sample = copy.deepcopy(module).eval(), sample
        self._graph: Any = None

    def bytes(self, state: Mapping[str, Tensor], description: str) -> bytes:
        """Make the file of a model: this state dict, with the description among its properties."""
        from onnx import helper, numpy_helper

        if self._graph is None or not _names(state) <= {entry.name for entry in self._graph.graph.initializer}:
            self.module.load_state_dict(state)
            self._graph = _traced(self.module, self.sample)
        for entry in self._graph.graph.initializer:
            if entry.name in state:
                entry.CopyFrom(numpy_helper.from_array(state[entry.name].numpy(), entry.name))
        helper.set_model_props(self._graph, {"fedtailor": description})
        written: bytes = self._graph.SerializeToString()
        return written


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
