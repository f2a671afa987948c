"""Fuzzing of everything that is read from strangers: data files, model files and settings.

`fuzz(seed, seconds)` makes mutants of small right files and reads them. Each is refused in a sentence or read; anything
else is a failure: another exception, a long time, or much memory. A mutant is a function of the seed, the reader's name
and its number: `replay` makes it again.

    python -m tests.fuzz.data_files 0 60
"""

import datetime
import gzip
import io
import json
import os
import random
import resource
import signal
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fedtailor._common.errors import FedtailorError
from fedtailor.cli.options import parse_assignments
from fedtailor.cli.run import _experiments
from fedtailor.data import federate, from_list, load, own_data
from fedtailor.data.table import Purpose, from_columns
from fedtailor.engines.own_code import written_parameters
from fedtailor.experiment import Evaluation, Experiment, make_experiment, read_experiment
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.model_files.format import HEADER
from fedtailor.model_files.prediction import predict
from fedtailor.studies.comparison import make_comparison
from tests.data.files import cifar_contents, png, write_mnist

LONG = 20  # seconds of one mutant
MUCH = 1.5e9  # bytes of memory that the process may grow by
LIMIT = "0.05"  # GB that data may take

Files = dict[str, bytes]
Harm = Callable[[bytes], bytes]
NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


class TooLong(BaseException):
    """A mutant took too long. Not an `Exception`: no reader may take it for a damaged file."""


def fuzz(seed: int, seconds: float) -> dict[str, Any]:
    """Read mutants, of each reader in turn, until the time is over. Returns how many there were, and all failures."""
    counts = {name: {"mutants": 0, "refused": 0} for name in READERS}
    failures: list[str] = []
    end, number = time.monotonic() + seconds, 0
    with _bounded():
        while time.monotonic() < end:
            for name in READERS:
                outcome = replay(seed, name, number)
                counts[name]["mutants"] += 1
                counts[name]["refused"] += outcome == "refused"
                if outcome not in ("refused", "read"):
                    failures.append(f"replay({seed}, {name!r}, {number}): {outcome}")
                if time.monotonic() >= end:
                    break
            number += 1
    return {"counts": counts, "failures": failures}


def replay(seed: int, name: str, number: int) -> str:
    """Make a mutant and read it: `refused`, `read`, or what went wrong."""
    rng = random.Random(f"{seed} {name} {number}")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak of memory so far
    before = _memory("VmRSS")
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _alarm():
            warnings.simplefilter("ignore")
            READERS[name](rng, Path(folder))
    except FedtailorError as error:
        said = str(error)
        if len(said) > 5_000 or "\n" in said:
            return f"a message of {len(said)} characters or several lines: {said[:200]!r}"
        outcome = "refused"
    except (Exception, TooLong) as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "fedtailor" in frame.filename] or list(where)
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(ours[-1].filename).name}, line {ours[-1].lineno})"
    else:
        outcome = "read"
    grown = _memory("VmHWM") - before
    return outcome if grown < MUCH else f"{grown / 1e9:.1f} GB of memory"


def _memory(kind: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at the most, VmSize reserved."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


@contextmanager
def _bounded() -> Iterator[None]:
    """Keep mutants from filling the machine's memory."""
    limits, before = resource.getrlimit(resource.RLIMIT_AS), os.environ.get("FEDTAILOR_DATA_LIMIT")
    os.environ["FEDTAILOR_DATA_LIMIT"] = LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + 6 * 10**9, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        os.environ.pop("FEDTAILOR_DATA_LIMIT")
        if before is not None:
            os.environ["FEDTAILOR_DATA_LIMIT"] = before


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TooLong(f"more than {LONG} s")

    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LONG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


# Mutations of bytes.


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Change a few places: bits, bytes, numbers, pieces cut out, doubled or put in."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(8):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 2:
                size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
                changed[at : at + size] = (rng.choice(NUMBERS) % 256**size).to_bytes(size, order)
            case 3:
                del changed[at : at + rng.choice((1, 4, 40, 400))]
            case 4:
                changed[at:at] = changed[at : at + rng.choice((1, 10, 1000))] * rng.choice((1, 2, 50))
            case 5:
                changed[at:at] = rng.randbytes(rng.choice((1, 3, 30)))
            case 6 if rng.random() < 0.2:
                del changed[at:]
            case 7:
                changed[at:at] = rng.choice(
                    (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b'"', b",", b"[", b"{", b"\x1b[")
                )
    return bytes(changed)


def mutate_one(rng: random.Random, files: Files) -> Files:
    """Change one of the files."""
    name = rng.choice(sorted(files))
    return {**files, name: mutated(rng, files[name])}


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def use(name: str, folder: Path, **options: Any) -> None:
    """Load data and partition them, as a run would."""
    data = load(name, folder, **options)
    partition = "iid" if data.client is None else "natural"
    clients = None if data.client is not None else 2
    federate(data, partition=partition, clients=clients, min_samples=1).counts()


# Data files.


def zipped(rng: random.Random, members: Files) -> bytes:
    """A zip file with a changed member, changed as a whole, or with all as it was."""
    stream, harm = io.BytesIO(), rng.choice(("inside", "outside", "name", "none"))
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in (mutate_one(rng, members) if harm == "inside" else members).items():
            odd = mutated(rng, name.encode()).decode("latin1") if harm == "name" and rng.random() < 0.3 else name
            archive.writestr(odd.replace("\0", "")[:1000] or "x", content)
    return mutated(rng, stream.getvalue()) if harm == "outside" else stream.getvalue()


def arrays(rng: random.Random, named: dict[str, Any]) -> Files:
    members = {}
    for name, array in named.items():
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
        members[f"{name}.npy"] = stream.getvalue()
    if rng.random() < 0.1:
        members.pop(rng.choice(sorted(members)))
    return members


def odd_array(rng: random.Random, right: Any) -> Any:
    """The right array, or now and then another of any type and shape."""
    if rng.random() < 0.85:
        return right
    size = rng.choice((0, 1, 20, 20, 21))
    shape = rng.choice(((size,), (size, 1), (size, 3), (), (size, 2, 2), (size, 4, 4, 3), (1,) * 20))
    kind = rng.choice(
        ("?", "i1", "u1", "<i8", ">u2", "u8", "f2", ">f4", "f8", "c8", "U3", "S4", "U0", "M8[s]", "V3", "g")
    )
    values = np.frombuffer(rng.randbytes(max(1, int(np.prod(shape))) * 16), np.uint8)
    try:
        return np.resize(values, shape).astype(kind)
    except (TypeError, ValueError):
        return np.zeros(shape, kind)


def npz(rng: random.Random, folder: Path) -> None:
    right = {
        "x": np.arange(60.0).reshape(20, 3),
        "y": rng.choice((np.arange(20) % 3, np.array(list("ab") * 10))),
        "client": np.arange(20) % 2,
        "group": np.arange(20) // 2,
        "split": np.array(["train", "train", "test", "validation"] * 5)[np.arange(20) // 2],
    }
    named = {name: odd_array(rng, array) for name, array in right.items()}
    write(folder, {"own.npz": zipped(rng, arrays(rng, named))})
    use("own.npz", folder, labelled=rng.random() < 0.8)


def medmnist(rng: random.Random, folder: Path) -> None:
    shape = rng.choice(((6, 28, 28), (6, 28, 28, 3), (6, 5, 5)))
    named: dict[str, Any] = {}
    for part in ("train", "val", "test"):
        named[f"{part}_images"] = odd_array(rng, np.ones(shape, np.uint8))
        named[f"{part}_labels"] = odd_array(rng, np.arange(6).reshape(6, 1) % rng.choice((2, 6)))
    write(folder, {"organamnist.npz": zipped(rng, arrays(rng, named))})
    use(rng.choice(("organamnist", "organamnist.npz")), folder)


@cache
def own_files() -> list[dict[str, Any]]:
    """The arrays of data that were objects: of a list of clients, and of a table."""
    clients = {name: (np.arange(30.0).reshape(10, 3), np.arange(10) % 2) for name in ("b", "a")}
    frame = {"age": [*range(9), float("nan")], "ward": ["n", "s"] * 5, "label": ["ill", "well"] * 5}
    made = from_columns("table", {n: np.array(v) for n, v in frame.items()}, {}, Purpose(), "The table")
    several = {name: ((x, x[:, 0] > 3), y) for name, (x, y) in clients.items()}
    return [own_data._arrays(data) for data in (from_list(clients), from_list(several), made)]


def own(rng: random.Random, folder: Path) -> None:
    named = {name: odd_array(rng, array) for name, array in rng.choice(own_files()).items()}
    about = named[own_data.ABOUT].tobytes()
    if rng.random() < 0.5 and about.startswith(b"{"):
        known = json.loads(about)
        known[rng.choice(sorted(known))] = rng.choice((*JSON, {}, ["a", "b"], ["a"] * 30, -1))
        about = json.dumps(known).encode()
    about = mutated(rng, about) if rng.random() < 0.2 else about
    named[own_data.ABOUT] = np.frombuffer(about, np.uint8)
    try:
        name = own_data._name(named) if rng.random() < 0.95 else "own-data-0123456789abcdef.npz"
    except ValueError:  # of arrays that have no plain bytes
        name = "own-data-0123456789abcdef.npz"
    write(folder, {name: zipped(rng, arrays(rng, named))})
    use(name, folder, labelled=rng.random() < 0.8)


CELLS = (
    "1", "1.0", "-0", "nan", "inf", "1e400", "1_0", "", " ", "x", '"', '""', "\0", "9" * 400, "é", "\u202e", "=1",
    "0x1",
    "x" * 2_000, "\r", "\ufeff", "١", "1,2", "\x1b[0m",
)  # fmt: skip


SAID = {
    "columns": (
        "a=number",
        "a=category, b=ignore",
        "label=number",
        "a",
        "=",
        '"',
        "a=ignore,b=ignore,c=ignore",
        "\0=x",
    ),
    "separator": (";", "tab", "\0", '"', "ab", "\n", "é"),
    "decimal": (".", ",", ""),
    "encoding": ("utf-8", "utf-16", "latin-1", "hex", "idna", "x" * 99, "\0"),
    "group": ("a", "b"),
    "split_column": ("a", "c"),
}


def table(rng: random.Random, folder: Path) -> None:
    known, odd = ("a", "b", "c", "label", "client", "y", "class"), ("", " a", *CELLS)
    columns = rng.sample(known if rng.random() < 0.7 else (*known, *odd), rng.choice((1, 3, 4, 6)))
    columns += rng.choice(([], ["target"]))
    lines = [columns, *([rng.choice(("1", "2", "0.5")) for _ in columns] for _ in range(rng.choice((0, 1, 12))))]
    for line in lines:
        if rng.random() < 0.05:
            line[rng.randrange(len(line))] = rng.choice(CELLS)
    text = "\n".join(map(",".join, lines)).encode("utf-8", "surrogatepass")
    write(folder, {"own.csv": mutated(rng, text) if rng.random() < 0.5 else text})
    chosen = rng.choice((None, None, "a", "label", "nothing"))
    said = {name: rng.choice(values) for name, values in SAID.items() if rng.random() < 0.1}
    use("own.csv", folder, labelled=rng.random() < 0.8, label_column=chosen, **said)


@cache
def pictures() -> tuple[bytes, ...]:
    """Small images of all formats."""
    from PIL import Image

    made = []
    for mode, kind in [
        ("L", "PNG"), ("RGB", "PNG"), ("1", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG"), ("L", "JPEG"),
        ("RGB", "JPEG"),
        ("CMYK", "JPEG"), ("RGB", "BMP"), ("P", "GIF"), ("L", "TIFF"), ("RGB", "TIFF"), ("F", "TIFF"), ("RGB", "WEBP"),
        ("L", "PPM"), ("RGB", "PPM"), ("RGB", "ICO"), ("RGB", "EPS"),
    ]:  # fmt: skip
        stream = io.BytesIO()
        Image.new(mode, (6, 5)).save(stream, kind)
        made.append(stream.getvalue())
    return tuple(made)


def images(rng: random.Random, folder: Path) -> None:
    files = {}
    for name in ("a/x/1.png", "a/y/2.jpg", "b/x/3.tif", "b/y/4.gif"):
        picture = rng.choice(pictures()[:2] if rng.random() < 0.5 else pictures())
        files[f"clinic/{name}"] = mutated(rng, picture) if rng.random() < 0.4 else picture
    write(folder, files)
    use("clinic", folder, image_size=rng.choice((None, 4)))


JSON = (None, True, -1, 0.5, 10**400, "", "x", "\ud800", [], [[]], {}, {"x": 1}, float("nan"), [0.5] * 784)


def leaf(rng: random.Random, folder: Path) -> None:
    """LEAF's three data sets, with odd values in any place or damaged as a text."""
    text, tweet = "to be or not"[:10], ["1", "Monday", "NO_QUERY", "ann", "not to be", "training"]
    x, y = rng.choice(((text, "t"), ([0.5] * 784, 61), (tweet, rng.choice((0, 1, 4)))))
    content: Any = {"users": ["ann", "bob"], "num_samples": [3, 3], "hierarchies": ["a", "b"]}
    content["user_data"] = {user: {"x": [x] * 3, "y": [y] * 3} for user in content["users"]}
    if rng.random() < 0.5:
        place: Any = content
        while isinstance(place, dict | list) and place:
            key = rng.choice(sorted(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if rng.random() < 0.3 or not isinstance(place[key], dict | list):
                place[key] = rng.choice(JSON)
                break
            place = place[key]
    written = json.dumps(content).encode()
    names = rng.choice((["own.json"], ["own/a.json"], ["own/train/a.json", "own/test/a.json"]))
    write(folder, {name: mutated(rng, written) if rng.random() < 0.3 else written for name in names})
    use(names[0].split("/")[0], folder)


@cache
def mnist_files() -> tuple[tuple[str, bytes], ...]:
    with tempfile.TemporaryDirectory() as folder:
        write_mnist(Path(folder) / "mnist", packed=False)
        return tuple((f"mnist/{path.name}", path.read_bytes()) for path in sorted((Path(folder) / "mnist").iterdir()))


def idx(rng: random.Random, folder: Path) -> None:
    files, inside = dict(mnist_files()), rng.random() < 0.5
    if inside:
        files = mutate_one(rng, files)
    if rng.random() < 0.5:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    write(folder, files if inside else mutate_one(rng, files))
    use("mnist", folder)


def cifar(rng: random.Random, folder: Path) -> None:
    name, kind = rng.choice(("cifar-10", "cifar-100")), rng.choice(("binary", "python"))
    files, _, _ = cifar_contents(name, kind)
    inside, packed = rng.random() < 0.5, rng.random() < 0.6
    if inside or not packed:
        files = mutate_one(rng, files)
    if packed:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for path, content in files.items():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        whole = stream.getvalue()
        if not inside and rng.random() < 0.5:
            whole = mutated(rng, whole)
        archive = gzip.compress(whole, 1)
        files = {f"{name}-{kind}.tar.gz": archive if rng.random() < 0.5 else mutated(rng, archive)}
    write(folder, files)
    use(name, folder)


def omniglot(rng: random.Random, folder: Path) -> None:
    drawing = png(np.arange(81, dtype=np.uint8).reshape(9, 9))
    for half in ("images_background", "images_evaluation"):
        names = [f"{half}/{letter}/character01/000{n}_0{n}.png" for letter in "AB" for n in (1, 2)]
        if rng.random() < 0.2:
            names.append(
                rng.choice((".png", "/", "../x.png", f"{half}/.png", f"{half}/A/c/x.png", f"{half}/A/c/1_99.png"))
            )
        write(folder, {f"omniglot/{half}.zip": zipped(rng, dict.fromkeys(names, drawing))})
    use("omniglot", folder)


# Model files.

DESCRIPTION: dict[str, Any] = {
    "fedtailor": "0", "kind": "personal", "client": 0, "name": "0", "method": "fedavg", "parameters": {},
    "data": "list",
    "round": 1, "rounds": 1, "fine_tuned": 0, "experiment": "", "accuracy": 0.5, "loss": 1.0, "test_samples": 4,
    "measured": "", "network": "mlp:8",
    "layers": "nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))",
    "load": [], "input_shape": [4], "dtype": "float32", "pixels": "unit", "preprocessing": "",
    "classes": ["a", "b", "c"],
    "outputs": 3, "counted": 3,
}  # fmt: skip
LAYERS = (
    "nn.Flatten()", "nn.Linear(4, 8)", "nn.ReLU()", "nn.Linear(8, 3)", "nn.Upsample(scale_factor=1000.0)",
    "nn.Unflatten(1, (1, 4))",
    "nn.AdaptiveAvgPool1d(100000000)", "nn.ConstantPad1d(99999999, 0.0)", "nn.Conv1d(1, 1, 3, padding=10000000)",
    "nn.Softmax(1)",
    "nn.ConvTranspose1d(1, 1, 9, stride=1000000)", "nn.LSTM(4, 4, 999999)", "nn.Sequential(nn.ReLU())", "nn.Identity()",
    "nn.Transformer(8, 2, 99999)", "nn.MaxPool1d(999999999)", "nn.Dropout(2.0)", "nn.Embedding(10, 3)",
    "nn.Flatten(0, -1)", "nn.BatchNorm1d(8)", "nn.PReLU()", "nn.LocalResponseNorm(99999999)",
    "nn.Fold(99999, 1)", "nn.Bilinear(4, 4, 3)",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 4, 10**9, 10**30, 0.5, -1e300, "", "x", "mlp:8", "cnn", "resnet", "float64", [], [4], [0],
    [-1],
    [10**12], [1, 2, 2], [[]], {}, {"a": {"b": []}}, ["a"], ["a", "b", "c"], "nn.Linear(4, 3)", "\x1b[0m", "é",
)  # fmt: skip


def model(rng: random.Random, folder: Path) -> None:
    about = dict(DESCRIPTION)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        about[rng.choice(sorted(about))] = rng.choice(VALUES)
    if rng.random() < 0.4:
        about["layers"] = f"nn.Sequential({', '.join(rng.choices(LAYERS, k=rng.choice((1, 2, 4))))})"
    text = json.dumps(about)
    if rng.random() < 0.1:
        depth = rng.choice((100, 100_000))
        text = text.replace('"parameters": {}', f'"parameters": {{"a": {"[" * depth}{"]" * depth}}}')
    if rng.random() < 0.2:
        text = mutated(rng, text.encode()).decode("utf-8", "replace").replace("\0", "")
    kind = rng.choice((torch.float32,) * 6 + (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool))
    shapes = {
        "1.weight": (8, 4),
        "1.bias": (8,),
        "3.weight": (3, 8),
        "3.bias": (3,),
        "0.weight": (3, 4),
        "0.bias": (3,),
    }
    names = sorted(shapes)[2:] if rng.random() < 0.8 else rng.sample(sorted(shapes), 4)
    content = save({name: torch.ones(shapes[name]).to(kind) for name in names}, {HEADER: text})
    if rng.random() < 0.4:
        content = mutated(rng, content)
    write(folder, {"model.safetensors": content})
    x = rng.choice(
        (np.zeros((5, 4)), np.zeros((5, 4)), np.ones((2, 4), np.uint8), np.zeros((0, 4)), [[1, 2, 3, 4]], "x")
    )
    predict(folder / "model.safetensors", x)


# Settings.

NAMES = (
    *Experiment.model_fields,
    *Evaluation.model_fields,
    "parameters.lam",
    "evaluation.model",
    "grid",
    "a.b.c",
    "",
    "é",
)
TOML = (
    "3", "-1", "0", "1e400", "nan", "-inf", "9" * 5_000, "0x" + "f" * 5_000, "'x'", '""', "'''a\nb'''", "true", "[]",
    "[1, 2]",
    "[[1], ['a']]", "{}", "{a = 1}", "{a = {b = [1]}}", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z",
    "[" * 500 + "]" * 500,
    "[" * 50_000, "{a=" * 300 + "1" + "}" * 300, "'" + "x" * 10_000 + "'", '"\\u0000"', '"\\u007f"', "'fedavg'",
    "'digits'",
    "'ditto'", "'dirichlet:0.3'", "0.5", "10", "'full'", "'cpu'", "['fedavg', 'ditto']", "[0, 1]", "'\x1b[0m'",
    "1_000", "+3",
)  # fmt: skip


def toml(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.choice((0, 1, 2, 4))):
        if rng.random() < 0.2:
            lines.append(
                rng.choice(
                    ("[evaluation]", "[parameters]", "[[parameters]]", "[parameters.ditto]", "[grid]", "[a.b]", "[")
                )
            )
        name = rng.choice(NAMES)
        lines.append(f"{name or chr(34) * 2} = {rng.choice(TOML)}")
    if rng.random() < 0.05:
        lines.append(".".join(["a"] * rng.choice((60, 20_000))) + " = 1")
    return "\n".join(lines)


def toml_file(rng: random.Random, folder: Path) -> Path:
    content = toml(rng).encode()
    write(folder, {"mine.toml": mutated(rng, content) if rng.random() < 0.4 else content})
    return folder / "mine.toml"


def experiment_file(rng: random.Random, folder: Path) -> None:
    experiment = make_experiment(read_experiment(toml_file(rng, folder)))
    written_parameters(find_method(experiment.method, experiment.parameters))


def comparison_file(rng: random.Random, folder: Path) -> None:
    make_comparison({"methods": ["fedavg", "ditto"], **read_experiment(toml_file(rng, folder))}).written()


def assignments(rng: random.Random, folder: Path) -> None:
    pairs = [f"{rng.choice((*NAMES, 'lam'))}={rng.choice(TOML)}" for _ in range(rng.choice((1, 2)))]
    if rng.random() < 0.3:
        pairs = [mutated(rng, pair.encode()).decode("utf-8", "surrogateescape") for pair in pairs]
    _experiments([rng.choice(("fedavg", "ditto", "pgfed"))], {}, parse_assignments(pairs))


def deep(levels: int) -> Any:
    nested: Any = 1
    for _ in range(levels):
        nested = [nested]
    return nested


PYTHON: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**9, 10**30, 10**5_000, -(10**5_000), 0.5, float("nan"), float("inf"), 1e308, "", "x", "3",
    "nan",
    "9" * 5_000, "\0", "\x7f", "\ud800", "a\nb", b"x", [], [None], [1, [2, None]], (1, (2,)), {"a": 1}, [{"a": 1}], {1,
    2}, {},
    {1: 2}, object(), object, len, Path("x"), datetime.date(2020, 1, 1), 1j, range(3), deep(50), deep(5_000),
    np.float64(0.5),
    np.int64(3), np.arange(3), torch.tensor(1.0), "all", "0.5", "4-28", "independent:0.2", "9-1", "1e999", "full", "²",
)  # fmt: skip


def python_settings(rng: random.Random, folder: Path) -> None:
    names = rng.sample(sorted(Experiment.model_fields), rng.choice((1, 2, 3)))
    settings: dict[str, Any] = {name: rng.choice(PYTHON) for name in names}
    if rng.random() < 0.3:
        settings["evaluation"] = {rng.choice(sorted(Evaluation.model_fields)): rng.choice(PYTHON)}
    make_experiment(settings)


def python_parameters(rng: random.Random, folder: Path) -> None:
    name = rng.choice([method for method in sorted(CATALOGUE) if CATALOGUE[method].model_fields])
    fields = sorted(CATALOGUE[name].model_fields)
    parameters = {rng.choice(fields): rng.choice(PYTHON) for _ in range(rng.choice((1, 2)))}
    experiment = make_experiment({"method": name, "parameters": parameters})
    written_parameters(find_method(experiment.method, experiment.parameters))


READERS: dict[str, Callable[[random.Random, Path], None]] = {
    "npz": npz,
    "own data": own,
    "medmnist": medmnist,
    "csv": table,
    "images": images,
    "leaf": leaf,
    "idx": idx,
    "cifar": cifar,
    "omniglot": omniglot,
    "model": model,
    "experiment file": experiment_file,
    "comparison file": comparison_file,
    "assignments": assignments,
    "settings": python_settings,
    "parameters": python_parameters,
}
