"""Fuzzing of everything that is read from strangers: data files, model files, and settings, plans and sites' files."""

import datetime
import gzip
import io
import json
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fedtailor._common.toml import write_toml
from fedtailor.cli.options import parse_assignments
from fedtailor.cli.run import _experiments
from fedtailor.data import federate, from_list, load, own_data
from fedtailor.data.table import Purpose, from_columns
from fedtailor.engines.own_code import written_parameters
from fedtailor.experiment import Evaluation, Experiment, make_experiment, read_experiment
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.model_files.format import HEADER
from fedtailor.model_files.prediction import predict
from fedtailor.sites.plan import read_plan
from fedtailor.sites.site_file import read_site
from fedtailor.studies.comparison import make_comparison
from tests.data.files import cifar_contents, png, write_mnist
from tests.fuzz.engine import Files, Luck, Target, mutate_one, mutated, write


def use(name: str, folder: Path, **options: Any) -> None:
    """Load data and partition them, as a run would."""
    data = load(name, folder, **options)
    partition = "iid" if data.client is None else "natural"
    clients = None if data.client is not None else 2
    federate(data, partition=partition, clients=clients, min_samples=1).counts()


# --- data files ---


def zipped(luck: Luck, members: Files) -> bytes:
    """A zip file; now and then with a changed member or name, or changed as a whole."""
    stream, harm = io.BytesIO(), luck.instead("", ("inside", "outside", "name"), 0.75)
    method = luck.right.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in (mutate_one(luck, members) if harm == "inside" else members).items():
            odd = mutated(luck, name.encode(), 0.3).decode("latin1") if harm == "name" else name
            archive.writestr(odd.replace("\0", "")[:1000] or "x", content)
    return mutated(luck, stream.getvalue()) if harm == "outside" else stream.getvalue()


def arrays(luck: Luck, named: dict[str, Any]) -> Files:
    members = {}
    for name, array in named.items():
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
        members[f"{name}.npy"] = stream.getvalue()
    if luck.chance(0.1):
        members.pop(luck.harm.choice(sorted(members)))
    return members


def odd_array(luck: Luck, right: Any) -> Any:
    """The right array, or now and then another of any type and shape."""
    if not luck.chance(0.15):
        return right
    rng = luck.harm
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


def npz(luck: Luck, folder: Path) -> None:
    right = {
        "x": np.arange(60.0).reshape(20, 3),
        "y": luck.right.choice((np.arange(20) % 3, np.array(list("ab") * 10))),
        "client": np.arange(20) // 2 % 2,
        "group": np.arange(20) // 2,
        "split": np.array(["train", "train", "test", "validation"] * 5)[np.arange(20) // 2],
    }
    named = {name: odd_array(luck, array) for name, array in right.items()}
    write(folder, {"own.npz": zipped(luck, arrays(luck, named))})
    use("own.npz", folder, labelled=luck.right.random() < 0.8)


def medmnist(luck: Luck, folder: Path) -> None:
    name, shape = luck.right.choice((("organamnist", (6, 28, 28)), ("bloodmnist", (6, 28, 28, 3))))
    shape = luck.instead(shape, ((6, 28, 28), (6, 28, 28, 3), (6, 5, 5)), 0.2)
    named: dict[str, Any] = {}
    for part in ("train", "val", "test"):
        named[f"{part}_images"] = odd_array(luck, np.ones(shape, np.uint8))
        named[f"{part}_labels"] = odd_array(luck, np.arange(6).reshape(6, 1) % luck.right.choice((2, 6)))
    write(folder, {f"{name}.npz": zipped(luck, arrays(luck, named))})
    use(luck.right.choice((name, f"{name}.npz")), folder)


@cache
def own_files() -> list[dict[str, Any]]:
    """The arrays of data that were objects: of a list of clients, and of a table."""
    clients = {name: (np.arange(30.0).reshape(10, 3), np.arange(10) % 2) for name in ("b", "a")}
    frame = {"age": [*range(9), float("nan")], "ward": ["n", "s"] * 5, "label": ["ill", "well"] * 5}
    made = from_columns("table", {n: np.array(v) for n, v in frame.items()}, {}, Purpose(), "The table")
    several = {name: ((x, x[:, 0] > 3), y) for name, (x, y) in clients.items()}
    return [own_data._arrays(data) for data in (from_list(clients), from_list(several), made)]


def own(luck: Luck, folder: Path) -> None:
    named = {name: odd_array(luck, array) for name, array in luck.right.choice(own_files()).items()}
    about = named[own_data.ABOUT].tobytes()
    if about.startswith(b"{") and luck.chance(0.5):
        known = json.loads(about)
        known[luck.harm.choice(sorted(known))] = luck.harm.choice((*JSON, {}, ["a", "b"], ["a"] * 30, -1))
        about = json.dumps(known).encode()
    named[own_data.ABOUT] = np.frombuffer(mutated(luck, about, 0.2), np.uint8)
    try:
        name = luck.instead(own_data._name(named), ["own-data-0123456789abcdef.npz"], 0.05)
    except ValueError:  # of arrays that have no plain bytes
        name = "own-data-0123456789abcdef.npz"
    write(folder, {name: zipped(luck, arrays(luck, named))})
    use(name, folder, labelled=luck.right.random() < 0.8)


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


def table(luck: Luck, folder: Path) -> None:
    columns = [*luck.right.sample(("a", "b", "c", "d"), luck.right.choice((1, 3))), "label"]
    rows = [[*(luck.right.choice(("1", "2", "0.5")) for _ in columns[1:]), str(number % 2)] for number in range(20)]
    lines = [columns, *rows]
    if luck.chance(0.2):
        columns[luck.harm.randrange(len(columns))] = luck.harm.choice(
            (*columns, "client", "y", "class", "", " a", *CELLS)
        )
    if luck.chance(0.1):
        del lines[luck.harm.choice((0, 1, 2, 12)) :]
    for line in lines:
        if luck.chance(0.05):
            line[luck.harm.randrange(len(line))] = luck.harm.choice(CELLS)
    text = "\n".join(map(",".join, lines)).encode("utf-8", "surrogatepass")
    write(folder, {"own.csv": mutated(luck, text or b"label", 0.5)})
    chosen = luck.instead(luck.right.choice((None, "label")), ("a", "nothing"), 0.1)
    said = {name: luck.harm.choice(values) for name, values in SAID.items() if luck.chance(0.05)}
    use("own.csv", folder, labelled=luck.right.random() < 0.8, label_column=chosen, **said)


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


def images(luck: Luck, folder: Path) -> None:
    files, right = {}, luck.right.choice(pictures()[:2])
    for name in ("a/x/1.png", "a/y/2.jpg", "b/x/3.tif", "b/y/4.gif"):
        files[f"clinic/{name}"] = mutated(luck, luck.instead(right, pictures(), 0.3), 0.3)
    write(folder, files)
    use("clinic", folder, image_size=luck.right.choice((None, 4)))


JSON = (None, True, -1, 0.5, 10**400, "", "x", "\ud800", [], [[]], {}, {"x": 1}, float("nan"), [0.5] * 784)


def leaf(luck: Luck, folder: Path) -> None:
    """LEAF's three data sets, with odd values in any place or damaged as a text."""
    text, tweet = "to be or not"[:10], ["1", "Monday", "NO_QUERY", "ann", "not to be", "training"]
    x, y = luck.right.choice(((text, "t"), ([0.5] * 784, 61), (tweet, luck.right.choice((0, 4)))))
    content: Any = {"users": ["ann", "bob"], "num_samples": [3, 3], "hierarchies": ["a", "b"]}
    content["user_data"] = {user: {"x": [x] * 3, "y": [y] * 3} for user in content["users"]}
    names = luck.right.choice((["own.json"], ["own/a.json"], ["own/train/a.json", "own/test/a.json"]))
    rng = luck.harm
    if luck.chance(0.6):
        place: Any = content
        while isinstance(place, dict | list) and place:
            key = rng.choice(sorted(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if rng.random() < 0.3 or not isinstance(place[key], dict | list):
                place[key] = rng.choice(JSON)
                break
            place = place[key]
    written = json.dumps(content).encode()
    write(folder, {name: mutated(luck, written, 0.3) for name in names})
    use(names[0].split("/")[0], folder)


@cache
def mnist_files() -> tuple[tuple[str, bytes], ...]:
    with tempfile.TemporaryDirectory() as folder:
        write_mnist(Path(folder) / "mnist", packed=False)
        return tuple((f"mnist/{path.name}", path.read_bytes()) for path in sorted((Path(folder) / "mnist").iterdir()))


def idx(luck: Luck, folder: Path) -> None:
    inside = luck.harm.random() < 0.5
    files = mutate_one(luck, dict(mnist_files())) if inside else dict(mnist_files())
    if luck.right.random() < 0.5:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    write(folder, files if inside else mutate_one(luck, files))
    use("mnist", folder)


def cifar(luck: Luck, folder: Path) -> None:
    name, kind = luck.right.choice(("cifar-10", "cifar-100")), luck.right.choice(("binary", "python"))
    files, _, _ = cifar_contents(name, kind)
    packed, where = luck.right.random() < 0.6, luck.harm.choice(("files", "tar", "gzip"))
    if not packed or where == "files":
        files = mutate_one(luck, files)
    if packed:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for path, content in files.items():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        whole = mutated(luck, stream.getvalue(), where == "tar")
        files = {f"{name}-{kind}.tar.gz": mutated(luck, gzip.compress(whole, 1), where == "gzip")}
    write(folder, files)
    use(name, folder)


def omniglot(luck: Luck, folder: Path) -> None:
    drawing = png(np.arange(81, dtype=np.uint8).reshape(9, 9))
    for half in ("images_background", "images_evaluation"):
        names = [f"{half}/{letter}/character01/000{n}_0{n}.png" for letter in "AB" for n in (1, 2)]
        if luck.chance(0.2):
            odd = (".png", "/", "../x.png", f"{half}/.png", f"{half}/A/c/x.png", f"{half}/A/c/1_99.png")
            names.append(luck.harm.choice(odd))
        write(folder, {f"omniglot/{half}.zip": zipped(luck, dict.fromkeys(names, drawing))})
    use("omniglot", folder)


# --- model files ---

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


def model(luck: Luck, folder: Path) -> None:
    about, rng = dict(DESCRIPTION), luck.harm
    while luck.chance(0.5):
        about[rng.choice(sorted(about))] = rng.choice(VALUES)
    if luck.chance(0.3):
        about["layers"] = f"nn.Sequential({', '.join(rng.choices(LAYERS, k=rng.choice((1, 2, 4))))})"
    text = json.dumps(about)
    if luck.chance(0.1):
        depth = rng.choice((100, 100_000))
        text = text.replace('"parameters": {}', f'"parameters": {{"a": {"[" * depth}{"]" * depth}}}')
    text = mutated(luck, text.encode(), 0.2).decode("utf-8", "replace").replace("\0", "")
    kind = luck.instead(torch.float32, (torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool), 0.3)
    shapes = {"1.weight": (8, 4), "1.bias": (8,), "3.weight": (3, 8), "3.bias": (3,)}
    if luck.chance(0.2):
        name = rng.choice(sorted(shapes))
        shape = shapes.pop(name)
        shapes[rng.choice((name, "0.weight", "x"))] = rng.choice((shape, (4,), (3, 4)))
    content = save({name: torch.ones(shape).to(kind) for name, shape in shapes.items()}, {HEADER: text})
    write(folder, {"model.safetensors": mutated(luck, content, 0.4)})
    x = luck.right.choice((np.zeros((5, 4)), np.ones((2, 4)), [[1, 2, 3, 4]]))
    predict(folder / "model.safetensors", luck.instead(x, (np.zeros((0, 4)), np.ones((2, 4), np.uint8), "x"), 0.1))


# --- settings ---

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


def odd_lines(luck: Luck) -> list[str]:
    """Lines of TOML that set anything to anything."""
    rng, lines = luck.harm, []
    for _ in range(rng.choice((1, 1, 2, 4))):
        if rng.random() < 0.2:
            sections = ("[evaluation]", "[parameters]", "[[parameters]]", "[parameters.ditto]", "[grid]", "[a.b]", "[")
            lines.append(rng.choice(sections))
        lines.append(f"{rng.choice(NAMES) or chr(34) * 2} = {rng.choice(TOML)}")
    if rng.random() < 0.05:
        lines.append(".".join(["a"] * rng.choice((60, 20_000))) + " = 1")
    return lines


def toml_file(luck: Luck, path: Path, settings: dict[str, Any]) -> Path:
    """Write a file of these settings; now and then with lines more or less, other values, or changed bytes."""
    lines = write_toml(settings).splitlines()
    if luck.chance(0.8):
        place = luck.harm.randrange(len(lines))
        match luck.harm.randrange(4):
            case 0:
                lines[place:place] = odd_lines(luck)
            case 1:
                lines[:] = odd_lines(luck)
            case 2:
                lines[place] = f"{lines[place].partition(' = ')[0]} = {luck.harm.choice(TOML)}"
            case _:
                del lines[place]
    write(path.parent, {path.name: mutated(luck, "\n".join(lines).encode(), 0.3)})
    return path


SETTINGS: tuple[dict[str, Any], ...] = (
    {"method": "ditto", "data": "digits", "rounds": 3, "parameters": {"lam": 0.5}, "evaluation": {"every": 2}},
    {"method": "pgfed+fedper", "lr": 0.1, "partition": "dirichlet:0.3", "participation": 0.5},
    {
        "method": "fedavg",
        "privacy": "client, clip=1.0, noise=0.8, delta=1e-5",
        "attack": "scaling",
        "aggregation": "median",
    },
)


def experiment_file(luck: Luck, folder: Path) -> None:
    path = toml_file(luck, folder / "mine.toml", luck.right.choice(SETTINGS))
    experiment = make_experiment(read_experiment(path))
    written_parameters(find_method(experiment.method, experiment.parameters))


def comparison_file(luck: Luck, folder: Path) -> None:
    asked = {"methods": ["fedavg", "ditto"], "seeds": [0, 1], "lr": 0.1, "grid": {"epochs": [1, 2]}}
    make_comparison(read_experiment(toml_file(luck, folder / "mine.toml", asked))).written()


PLAN = {"name": "trial", "sites": ["north", "south"], "experiment": {"method": "fedper", "rounds": 3, "seed": 3}}


def plan_file(luck: Luck, folder: Path) -> None:
    read_plan(toml_file(luck, folder / "federation.toml", PLAN)).terms()


def site_file(luck: Luck, folder: Path) -> None:
    write(folder, {"federation.toml": write_toml(PLAN).encode()})
    own = {"name": "north", "plan": "federation.toml", "data": "patients.csv", "epsilon": 3.0}
    read_site(toml_file(luck, folder / "site.toml", own))


def assignments(luck: Luck, folder: Path) -> None:
    pairs = ["lr=0.1", "evaluation.every=2"]
    while luck.chance(0.6):
        pairs.append(f"{luck.harm.choice((*NAMES, 'lam'))}={luck.harm.choice(TOML)}")
    pairs = [mutated(luck, pair.encode(), 0.2).decode("utf-8", "surrogateescape") for pair in pairs]
    _experiments([luck.right.choice(("fedavg", "ditto", "pgfed"))], {}, parse_assignments(pairs))


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


def python_settings(luck: Luck, folder: Path) -> None:
    settings: dict[str, Any] = {"method": "ditto", "rounds": 3}
    while luck.chance(0.7):
        settings[luck.harm.choice(sorted(Experiment.model_fields))] = luck.harm.choice(PYTHON)
    if luck.chance(0.3):
        settings["evaluation"] = {luck.harm.choice(sorted(Evaluation.model_fields)): luck.harm.choice(PYTHON)}
    make_experiment(settings)


def python_parameters(luck: Luck, folder: Path) -> None:
    name = luck.right.choice([method for method in sorted(CATALOGUE) if CATALOGUE[method].model_fields])
    parameters = {}
    while luck.chance(0.8):
        parameters[luck.harm.choice(sorted(CATALOGUE[name].model_fields))] = luck.harm.choice(PYTHON)
    experiment = make_experiment({"method": name, "parameters": parameters})
    written_parameters(find_method(experiment.method, experiment.parameters))


TARGETS: dict[str, Target] = {
    "npz": npz,
    "own data": own,
    "medmnist": medmnist,
    "csv": table,
    "images": images,
    "leaf": leaf,
    "idx": idx,
    "cifar": cifar,
    "omniglot": omniglot,
    "model file": model,
    "experiment file": experiment_file,
    "comparison file": comparison_file,
    "plan of a federation": plan_file,
    "file of a site": site_file,
    "assignments": assignments,
    "settings": python_settings,
    "parameters": python_parameters,
}
