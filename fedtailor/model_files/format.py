"""Model files: a state dict as safetensors, with a description of how to use it.

The description is in the file's header, and beside it as JSON for people and other programs. Reading a file runs
no code that the file names.
"""

import json
from math import prod
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory, write_atomically
from fedtailor.data.foreign_files import reading
from fedtailor.data.preprocessing import Preprocessing
from fedtailor.model_files.card import card
from fedtailor.model_files.onnx import OnnxNetwork
from fedtailor.models import CATALOGUE, ModelLike, build_model
from fedtailor.models.expression import MOST_VALUES, build_expression, check_work
from fedtailor.training.isolation import isolated
from fedtailor.training.layers import takes_integers
from fedtailor.training.metrics import Metric

HEADER = "fedtailor"  # the description's name in the header
ON_THE_HUB = "model"  # the name of a model in a folder of its own, by which huggingface_hub finds it
Size = Annotated[int, Field(ge=1, le=MOST_VALUES)]
ModelKind = Literal["personal", "global", "adapted"]
Sizes = Annotated[tuple[Size, ...], Field(max_length=8)]


class Description(BaseModel):
    """The description in a model file."""

    model_config = ConfigDict(frozen=True)

    fedtailor: str = Field(description="the version that wrote it")
    kind: ModelKind
    client: int | None = Field(description="the client's number; none for the global model")
    name: str | None = Field(description="the client's name")
    method: str
    parameters: dict[str, object] = Field(description="the method's own")
    data: str
    round: int = Field(description="the round after which the model was taken")
    rounds: int = Field(description="the rounds of the experiment")
    fine_tuned: int = Field(description="epochs of fine-tuning on the client's own data after that")
    experiment: str = Field(description="checksum (SHA-256) of all settings that change the numbers")
    metric: Metric | None = Field(None, description="the metric that decided in the run")
    value: float | None = Field(None, description="its value for this model")
    accuracy: float | None
    loss: float | None
    test_samples: int
    measured: str = Field(description="how these were measured, in words")
    network: str = Field(description="its name in fedtailor", max_length=1_000)
    layers: str | None = Field(description="the network in plain PyTorch, if it is made of torch.nn's layers alone")
    load: list[str] = Field(description="three lines of Python that load the model")
    input_shape: Sizes | tuple[Sizes, ...] = Field(
        description="of one sample, or of each of its inputs where there are several", min_length=1, max_length=8
    )
    tokens: Size | None = Field(None, description="number of token values, where samples are whole numbers")
    dtype: Literal["float32", "float64"]
    pixels: Literal["unit", "signed"]
    preprocessing: str = Field(description="how samples become inputs, in words")
    classes: tuple[str, ...] = Field(description="in the order of the outputs; none for a regression")
    multi_label: bool = Field(False, description="a sample may have any of the classes: an output above 0 says so")
    outputs: Size = Field(description="of the network")
    counted: Size = Field(description="the first so many of the outputs count")
    label_column: str | None = Field(None, description="of the CSV file that it was trained on: no feature")
    client_column: str | None = Field(None, description="of the CSV file that it was trained on: no feature")
    table: Preprocessing | None = Field(None, description="the columns of a table, and how they become inputs")

    @property
    def input_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of a sample's inputs, of which there is one or several."""
        several = [shape for shape in self.input_shape if isinstance(shape, tuple)]
        return several or [self.input_shape]  # type: ignore[list-item]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if sum(prod(shape) for shape in self.input_shapes) > MOST_VALUES:
            raise ValueError("a sample is too large")
        if self.counted > self.outputs or len(self.classes) not in (0, self.counted):
            raise ValueError("outputs and classes differ in number")
        if self.table is not None and self.input_shape != (self.table.n_features,):
            raise ValueError("the table has another number of features")
        return self


def files_of(stem: Path, onnx: bool) -> list[Path]:
    """List the files that a model is written to; in a folder for a hub, the description has the name of such folders,
    and a page stands beside it."""
    model, about, graph = (stem.with_name(stem.name + suffix) for suffix in (".safetensors", ".json", ".onnx"))
    described = [stem.with_name("config.json"), stem.with_name("README.md")] if stem.name == ON_THE_HUB else [about]
    return [model, *described, *([graph] if onnx else [])]


def check_free(files: list[Path], overwrite: bool) -> None:
    """Refuse to overwrite existing files, and to write below a file."""
    folder = files[0].parent
    if folder.exists() and not folder.is_dir():
        raise FedtailorError(f"{folder} is a file: choose a directory.")
    if not overwrite and (there := next((file for file in files if file.exists()), None)):
        raise FedtailorError(f"{there} exists already: choose another place, or allow it with --overwrite.")


def write_model(
    stem: Path, state: dict[str, Tensor], description: Description, onnx: OnnxNetwork | None = None
) -> list[Path]:
    """Write a model's files and return their paths; the first is the model itself."""
    text = description.model_dump_json(indent=2) + "\n"
    state = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    contents = [
        _of_pytorch(save(state, {HEADER: text})),
        text.encode(),
        *([card(description).encode()] if stem.name == ON_THE_HUB else []),
        *([onnx.bytes(state, text, description.table)] if onnx else []),
    ]
    files = files_of(stem, onnx is not None)
    make_directory(stem.parent)
    for file, content in zip(files, contents, strict=True):
        write_atomically(file, content)
    return files


def _of_pytorch(content: bytes) -> bytes:
    """Say in a file's header that it is PyTorch's, as other programs ask for that. Not by `save`, which writes two
    entries in any order: equal models have equal bytes."""
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    header["__metadata__"]["format"] = "pt"
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[size:]


@isolated()
def read_model(path: str | Path) -> tuple[Description, dict[str, Tensor]]:
    """Read the description and the state dict of a model file, given by its path, that of the JSON beside it or that of
    a folder for a hub."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    path = path.with_stem(ON_THE_HUB) if path.name == "config.json" else path
    path = path.with_suffix(".safetensors") if path.suffix == ".json" else path
    if not path.is_file():
        raise FedtailorError(f"There is no model file {path}: make one with `fedtailor export`.")
    with reading(path, "it is no safetensors file, or a damaged one"), safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    try:
        return Description.model_validate_json(header[HEADER]), state
    except (KeyError, ValidationError):
        raise FedtailorError(
            f"The file {path} is no model that fedtailor exported: its header does not say so."
        ) from None


def load_model(path: str | Path, model: ModelLike | None = None) -> nn.Module:
    """Load the network of a model file, ready to predict.

    A network that is a class of your own is code, which no file can bring along: pass it, or its name `module:Class`,
    as `model`.
    """
    return built(path, *read_model(path), model)


@isolated()
def built(path: str | Path, about: Description, state: dict[str, Tensor], model: ModelLike | None = None) -> nn.Module:
    """Build the network of a description, with these values."""
    name = model or about.network
    known = isinstance(name, str) and name.partition(":")[0] in CATALOGUE
    try:
        if model is None and about.layers is not None:
            module = build_expression(about.layers)
        elif model is not None or known:  # sizes that a file names take no memory before its values fit them
            device = "meta" if known else "cpu"
            module = build_model(name, about.input_shape, about.outputs, 0, device, about.tokens)
        else:
            raise FedtailorError(
                f"The network of {path} is a class of its own ({about.network}), which is code: say which one to use "
                f"with --model module:Class (model= in Python)."
            )
        if next(module.parameters()).is_meta:
            kind = torch.int64 if takes_integers(module) else torch.float32
            check_work(module, torch.zeros(1, *about.input_shape, dtype=kind, device="meta"), about.outputs)
        for key, tensor in module.state_dict().items():
            wanted = getattr(torch, about.dtype) if tensor.is_floating_point() else tensor.dtype
            if key in state and state[key].dtype != wanted:
                raise TypeError("the values are of another type than the description says")
        module.load_state_dict(state, assign=True)
    except FedtailorError:
        raise
    except Exception:  # whatever a network raises that is given other sizes or values than its own
        raise FedtailorError(f"The network and the values of {path} do not fit together.") from None
    return module.eval()
