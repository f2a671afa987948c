"""Shifts of the clients' features: closed forms, what is drawn, and that nothing else changes."""

import base64
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.data import Dataset, FederatedData, Join, federate, from_list, load
from fedtailor.data.contact_sheet import contact_sheet
from fedtailor.data.shifts import SHIFTS, Context, with_shifts
from fedtailor.engines.own_code import named_code
from fedtailor.experiment import make_experiment
from fedtailor.model_files.prediction import Model
from fedtailor.training.streams import numpy_stream

TABLE = "label,client,age,income,ward\n" + "".join(
    f"{'ill' if k % 3 else 'well'},c{k % 4},{20 + k * 7 % 50},{1000 * (k % 11)},{'abc'[k % 3]}\n" for k in range(120)
)


def applied(name: str, x: torch.Tensor, *values: float, unit: float = 1.0) -> torch.Tensor:
    rng = numpy_stream(0, "test")
    context = Context(torch.full((x.shape[1],), unit, dtype=x.dtype), 0.0, rng)
    return SHIFTS[name].apply(x.clone(), torch.tensor(values, dtype=x.dtype), context)


def images(n: int = 5, side: int = 8, channels: int = 3) -> torch.Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(1))


def pair(shift: str, **settings: object) -> tuple[FederatedData, FederatedData]:
    """A federation of digits without shifts, and with them."""
    data = load("digits")
    settings = {"clients": 6, "seed": 3, **settings}
    plain = federate(data, partition="dirichlet:0.3", **settings)  # type: ignore[arg-type]
    return plain, federate(data, partition=f"dirichlet:0.3+{shift}", **settings)  # type: ignore[arg-type]


# --- each shift ---


def test_four_quarter_turns_are_the_identity() -> None:
    x = images()
    turned = x
    for _ in range(4):
        turned = applied("rotate", turned, 90)
    assert torch.equal(turned, x)
    assert not torch.equal(applied("rotate", x, 90), x)
    assert torch.equal(applied("rotate", x, -90), applied("rotate", x, 270))
    assert torch.equal(applied("rotate", x, 90)[0, 0, -1], x[0, 0, :, 0])  # counter-clockwise: the left side comes down
    assert torch.equal(applied("rotate", x[:, :, :5], 180), x[:, :, :5].flip(2, 3))


def test_other_angles_are_between_the_quarter_turns() -> None:
    x = images()
    assert torch.allclose(applied("rotate", x, 89.999), applied("rotate", x, 90), atol=1e-3)
    column = torch.zeros(1, 1, 9, 9)
    column[..., 4] = 1  # a vertical bar becomes a diagonal one
    diagonal = applied("rotate", column, 45)[0, 0]
    assert torch.allclose(applied("rotate", torch.ones(1, 1, 9, 9), 45), torch.ones(1, 1, 9, 9))  # the edge goes on
    assert min(diagonal[k, k] for k in range(2, 7)) > 0.9
    assert max(diagonal[2, 6], diagonal[6, 2]) < 0.1
    wide = torch.zeros(1, 1, 5, 11)
    wide[..., 2, 7] = 1  # of an image that is no square, the frame stays: two to the right becomes two up
    assert applied("rotate", wide, 90)[0, 0, 0, 5] == pytest.approx(1, abs=1e-5)


def test_noise_has_its_variance_and_scale_and_offset_are_exact() -> None:
    x = torch.full((200, 3, 20, 20), 0.5)
    noise = applied("noise", x, 0.2, unit=2.0) - x
    assert float(noise.std()) == pytest.approx(0.4, rel=0.01)
    assert abs(float(noise.mean())) < 4 * 0.4 / noise.numel() ** 0.5
    assert torch.equal(applied("scale", x, 1.5, 1, 2), x * torch.tensor([1.5, 1, 2])[:, None, None])
    assert torch.equal(applied("offset", x, 0.5, 0, -1, unit=0.5), x + torch.tensor([0.25, 0, -0.5])[:, None, None])
    assert torch.equal(applied("brightness", x, 0.25), x + 0.25)


def test_contrast_keeps_the_mean_and_scales_the_rest() -> None:
    x = images()
    shifted = applied("contrast", x, 0.5)
    assert torch.allclose(shifted.mean((1, 2, 3)), x.mean((1, 2, 3)))
    assert torch.allclose(shifted.std((1, 2, 3)), 0.5 * x.std((1, 2, 3)))


def test_blur_and_resolution_keep_what_is_constant_and_the_sum() -> None:
    flat = torch.full((2, 1, 7, 9), 0.3, dtype=torch.float64)
    for name, value in (("blur", 1.5), ("resolution", 4)):
        assert torch.allclose(applied(name, flat, value), flat, atol=1e-15)
    point = torch.zeros(1, 1, 31, 31, dtype=torch.float64)
    point[..., 15, 15] = 1
    blurred, places = applied("blur", point, 2.0)[0, 0], torch.arange(31) - 15.0
    assert float(blurred.sum()) == pytest.approx(1)
    assert torch.allclose(blurred, blurred.T)
    assert float((blurred.sum(0) * places**2).sum()) == pytest.approx(4, rel=0.03)  # its variance; cut off at 3 σ
    corner = torch.zeros(1, 1, 9, 9)
    corner[..., 0, 0] = 1  # what leaves on one side does not come in on the other
    assert not applied("blur", corner, 1.0)[..., 5:, 5:].any()
    squares = applied("resolution", images(side=8), 4)
    assert torch.equal(squares[:, :, :4, :4], squares[:, :, :1, :1].expand(-1, -1, 4, 4))
    assert torch.allclose(squares[:, :, 0, 0], images(side=8)[:, :, :4, :4].mean((2, 3)))
    uneven = applied("resolution", images(side=8), 3)  # the last square is cut
    assert torch.allclose(uneven[:, :, 2, 2], images(side=8)[:, :, :3, :3].mean((2, 3)))
    assert torch.allclose(uneven[:, :, 7, 7], images(side=8)[:, :, 6:, 6:].mean((2, 3)))


@pytest.mark.parametrize(
    "neutral", ["rotate:0", "contrast:1", "brightness:0", "blur:0", "resolution:1", "scale:1", "offset:0", "noise:0"]
)
@pytest.mark.parametrize("pixels", ["unit", "signed"])
def test_a_neutral_value_changes_no_bit(neutral: str, pixels: str) -> None:
    data = replace(load("digits"), x=(load("digits").x * 255).to(torch.uint8))  # type: ignore[operator]
    one = federate(data, partition="iid", clients=4, pixels=pixels)  # type: ignore[arg-type]
    other = federate(data, partition=f"iid+{neutral}", clients=4, pixels=pixels)  # type: ignore[arg-type]
    assert one.fingerprint() == other.fingerprint()
    assert one.x.stride() == other.x.stride()  # type: ignore[union-attr]


# --- what is drawn ---


def test_a_shift_changes_no_label_and_no_share() -> None:
    plain, other = pair("rotate:0,90,180,270+noise:0.1")
    assert torch.equal(plain.y, other.y)
    assert torch.equal(plain.bounds, other.bounds)
    assert not torch.equal(plain.x, other.x)  # type: ignore[arg-type]


def test_each_client_has_the_shift_that_is_written_down() -> None:
    """In training, validation and test, of new clients too."""
    plain, other = pair("rotate:0,90,180,270", new_clients=2)
    for client, shift in enumerate(other.shifts):
        turns = int(shift["rotate"][0] // 90)
        assert torch.equal(other.client(client).x, torch.rot90(plain.client(client).x, turns, (2, 3)))  # type: ignore
    assert len({shift["rotate"][0] for shift in other.shifts}) > 1


def test_a_clients_shift_is_of_its_own_stream() -> None:
    """Another shift beside it, or more clients, do not change it; another seed does."""
    one, more = pair("noise:0..1")[1].shifts, pair("rotate:0,90+noise:0..1")[1].shifts
    assert [shift["noise"] for shift in one] == [shift["noise"] for shift in more]
    assert one == pair("noise:0..1", clients=8)[1].shifts[:6]
    assert one != pair("noise:0..1", seed=4)[1].shifts
    values = [shift["noise"][0] for shift in one]
    assert len(set(values)) == 6
    assert 0 <= min(values) < max(values) <= 1
    both = pair("noise:0..1+brightness:0..1")[1].shifts
    assert all(shift["noise"] != shift["brightness"] for shift in both)


def test_every_client_has_noise_of_its_own() -> None:
    rows = np.tile(np.array([[1], [-1]], np.float32), (30, 4))
    data = from_list([(rows, np.arange(60) % 2)] * 2)
    plain, noisy = (federate(data, partition=partition) for partition in ("natural", "natural+noise:1"))
    noise = torch.stack([(noisy.client(k).x - plain.client(k).x).flatten() for k in (0, 1)])  # type: ignore
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 4 / 240**0.5


def test_new_clients_may_have_a_shift_that_nobody_had() -> None:
    other = pair("rotate:0,90/180,270", new_clients=3)[1]
    turns = [shift["rotate"][0] for shift in other.shifts]
    assert {*turns[:3]} <= {0, 90}
    assert {*turns[3:]} <= {180, 270}
    assert pair("rotate:90", new_clients=3)[1].shifts == ({"rotate": [90.0]},) * 6


def test_clients_that_come_later_keep_their_shifts() -> None:
    there = pair("noise:0..1", new_clients=3)[1]
    joined = there.with_joined(Join(1, (there.names[4],), None, None, ""))
    assert joined.shifts == tuple(there.shifts[client] for client in (0, 1, 2, 4, 3, 5))
    both = there.with_new(pair("rotate:90", clients=4)[1])
    assert both.shifts == (*there.shifts, *({"rotate": [90.0]},) * 4)
    assert there.with_new(pair("rotate:90", clients=4)[0]).shifts == (*there.shifts, *({},) * 4)


def test_shifts_are_in_the_order_that_is_written() -> None:
    bright = federate(load("digits"), partition="iid+brightness:0.5+contrast:2", clients=1)
    assert list(bright.shifts[0]) == ["brightness", "contrast"]
    plain = federate(load("digits"), partition="iid", clients=1)
    there = slice(0, int(plain.bounds[0, -1]))
    expected = applied("contrast", applied("brightness", plain.x[there], 0.5), 2)  # type: ignore[arg-type]
    assert torch.equal(bright.x[there], expected)  # type: ignore[arg-type]


def test_signed_pixels_are_shifted_before_they_are_signed() -> None:
    data = replace(load("digits"), x=(load("digits").x * 255).to(torch.uint8))  # type: ignore[operator]
    unit, signed = (
        federate(data, partition="iid+brightness:0.25", clients=2, pixels=pixels)
        for pixels in ("unit", "signed")  # type: ignore[arg-type]
    )
    assert torch.equal(unit.x * 2 - 1, signed.x)  # type: ignore[operator, arg-type]


# --- tables and sensors ---


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "wards.csv"
    path.write_text(TABLE)
    return str(path)


def test_a_laboratory_of_other_units_is_what_its_client_declares(table: str) -> None:
    """A client's mean is that of its shifted cells, and its own preprocessing undoes scale and offset."""
    plain, shifted = (
        federate(load(table), partition=partition, preprocessing="per-client")
        for partition in ("natural", "natural+scale:0.5..2+offset:-1..1")
    )
    assert torch.allclose(plain.x, shifted.x, atol=1e-5)  # type: ignore[arg-type]
    for before, after, shift in zip(plain.facts, shifted.facts, shifted.shifts, strict=True):
        assert after[2].mean == before[2].mean  # a category
        assert shift["scale"][2] == 1
        assert after[0].squares == pytest.approx(shift["scale"][0] ** 2 * before[0].squares)
    together = federate(load(table), partition="natural+scale:0.5..2+offset:-1..1")
    assert not torch.allclose(plain.x, together.x, atol=1e-2)  # type: ignore[arg-type]


def test_missing_columns_are_missing_cells_of_a_table(table: str) -> None:
    data = federate(load(table), partition="natural+missing:1")
    gone = [int(shift["missing"][0]) for shift in data.shifts]
    for facts, place in zip(data.facts, gone, strict=True):
        assert [column.missing > 0 for column in facts] == [place == k for k in range(3)]
        assert facts[place].count == 0
    two = federate(load(table), partition="natural+missing:2")
    assert all(len(set(shift["missing"])) == 2 for shift in two.shifts)


def test_the_deviation_is_that_of_the_training_samples_of_training_clients() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((40, 2)).astype(np.float32) * 10**k, np.arange(40) % 2) for k in range(3)]
    plain, moved = (federate(from_list(clients), partition=p, new_clients=1) for p in ("natural", "natural+offset:1"))
    trained = torch.cat([plain.train(client)[0] for client in range(2)]).double()  # type: ignore[arg-type]
    found = (moved.train(0)[0] - plain.train(0)[0])[0]  # type: ignore[operator, index]
    assert found.tolist() == pytest.approx(trained.std(0, correction=0).tolist(), rel=1e-5)


def test_missing_cells_and_categories_have_no_part_in_offset_and_noise(tmp_path: Path) -> None:
    rows = [f"{'ill' if k % 3 else 'well'},c{k % 4},{'' if k % 5 == 0 else k},{'abc'[k % 3]}" for k in range(120)]
    (tmp_path / "gaps.csv").write_text("label,client,age,ward\n" + "\n".join(rows) + "\n")
    plain, moved = (
        federate(load(str(tmp_path / "gaps.csv")), partition=p, preprocessing=None).x
        for p in ("natural", "natural+offset:1+noise:0.5")
    )
    assert torch.equal(moved[:, 0].isnan(), plain[:, 0].isnan())  # type: ignore[index]
    there = ~plain[:, 0].isnan()  # type: ignore[index]
    assert 20 < float((moved - plain)[there, 0].mean()) < 50  # type: ignore[operator]
    assert torch.equal(moved[:, 1], plain[:, 1])  # type: ignore[index]


def test_offset_and_noise_of_features_go_by_their_deviation() -> None:
    rng = np.random.default_rng(0)
    windows = rng.standard_normal((4000, 2, 6)).astype(np.float32) * np.array([1, 100], np.float32)[:, None]
    data = from_list([(windows, np.arange(4000) % 2)])
    plain, noisy, dead = (
        federate(data, partition=p, test=0) for p in ("natural", "natural+noise:0.5", "natural+missing:1")
    )
    spread = (noisy.x - plain.x).std((0, 2))  # type: ignore[operator]
    assert spread.tolist() == pytest.approx([0.5, 50], rel=0.03)
    channel = int(dead.shifts[0]["missing"][0])
    assert not dead.x[:, channel].any()  # type: ignore[index]
    assert torch.equal(dead.x[:, 1 - channel], plain.x[:, 1 - channel])  # type: ignore[index]


# --- what is refused ---


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("rotate:0,90", "not how samples are shared: write for example 'iid+rotate:0,90'"),
        ("iid+rotat:0,90", "There is no shift 'rotat': did you mean 'rotate'?"),
        ("iid+rotate", "needs numbers from -360 to 360: write for example 'rotate:0,0.5', or a range"),
        ("iid+rotate:0,x", "needs numbers"),
        ("iid+rotate:0,999", "from -360 to 360"),
        ("iid+resolution:1.5", "needs whole numbers from 1 to 1000: write for example 'resolution:1,3'."),
        ("iid+noise:1..0", "needs numbers from 0 to 1000"),
        ("iid+noise:nan", "needs numbers"),
        ("iid+noise:1+noise:2", "has the shift 'noise' twice"),
        ("iid+missing:1", "does not fit 'digits', whose samples are images"),
    ],
)
def test_a_shift_that_cannot_be_is_refused_in_a_sentence(partition: str, said: str) -> None:
    with pytest.raises(FedtailorError) as error:
        federate(load("digits"), partition=partition)
    assert said in str(error.value)


def test_a_shift_that_does_not_fit_the_samples_is_refused(table: str) -> None:
    with pytest.raises(
        FedtailorError, match=r"'rotate' does not fit .* are rows of a table: take one of scale, offset"
    ):
        federate(load(table), partition="natural+rotate:90")
    with pytest.raises(FedtailorError, match=r"All 3 columns of 'wards\.csv' would be missing"):
        federate(load(table), partition="natural+missing:0,3")
    with pytest.raises(FedtailorError, match="would be missing"):
        federate(load(table), partition="natural+missing:0/3", new_clients=1)
    tokens = from_list([(np.arange(40).reshape(20, 2), np.arange(20) % 2)] * 2)
    with pytest.raises(FedtailorError, match="cannot be shifted"):
        federate(tokens, partition="natural+noise:1")


def test_code_before_a_shift_is_still_code() -> None:
    assert named_code(make_experiment({"partition": "mine:halves+noise:1"})) == {"partition": "mine:halves+noise:1"}
    assert with_shifts("split.csv+noise:1")[0] == "split.csv"
    assert with_shifts("a+b.csv") == ("a+b.csv", [])


# --- in a run ---

RUN: dict[str, Any] = {
    "data": "digits",
    "model": "logistic",
    "clients": 5,
    "seed": 1,
    "rounds": 3,
    "workers": 2,
    "new_clients": 1,
}
SHIFTED = "dirichlet:0.5+rotate:0,90,180/270+noise:0..0.2"


def records(path: Path) -> list[bytes]:
    return [(path / name).read_bytes() for name in ("partition.json", "clients.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_the_same_bits_on_all_engines(engine: str, tmp_path: Path) -> None:
    runs = [ft.run("ditto", **RUN, partition=SHIFTED, engine=e, out=tmp_path / e) for e in ("in-process", engine)]
    assert records(tmp_path / "in-process") == records(tmp_path / engine)
    assert torch.equal(runs[0].personal_vector(2), runs[1].personal_vector(2))


@pytest.mark.slow
def test_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    ft.run("ditto", **RUN, partition=SHIFTED, out=tmp_path / "whole")
    program = (
        "import os, fedtailor as ft\n"
        "def stop(record):\n    if record.round == 2: os.kill(os.getpid(), 9)\n"
        f"ft.run('ditto', **{RUN!r}, partition={SHIFTED!r}, out={str(tmp_path / 'killed')!r}, on_round=stop)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    ft.resume(tmp_path / "killed")
    assert records(tmp_path / "whole") == records(tmp_path / "killed")


def test_adapt_and_predict_see_a_client_through_its_own_camera(tmp_path: Path) -> None:
    result = ft.run("local", **{**RUN, "engine": "in-process", "rounds": 1}, partition=SHIFTED, out=tmp_path / "run")
    assert [shift["rotate"][0] for shift in result.partition["shifts"]][-1] == 270  # the new one
    there = partitioned(result)
    adapted = ft.adapt(tmp_path / "run", epochs=1)
    x, y = there.test(4)
    weight, bias = adapted.models[4].values()
    right = (x.flatten(1) @ weight.T + bias).argmax(1) == y  # type: ignore[union-attr]
    assert adapted.per_client[4].adapted[-1].accuracy == pytest.approx(float(right.double().mean()))
    (model,) = [path for path in ft.export(result, to=tmp_path / "models", client=2) if path.suffix == ".safetensors"]
    samples = Model(model).of_run(tmp_path / "run", client="2", part="test")
    assert torch.equal(samples.inputs, there.test(2)[0])  # type: ignore[arg-type]


def test_the_report_shows_an_image_of_each_client(tmp_path: Path) -> None:
    settings = {"data": "digits", "model": "logistic", "clients": 3, "rounds": 1, "engine": "in-process"}
    result = ft.run("local", **settings, partition="iid+rotate:90,180", out=tmp_path / "run")  # type: ignore[arg-type]
    page = ft.report(tmp_path / "run", to=tmp_path / "page.html").read_text()
    assert f"data:image/png;base64,{result.partition['picture']}" in page
    assert base64.b64decode(result.partition["picture"]) == contact_sheet(
        federate(load("digits"), partition="iid+rotate:90,180", clients=3)
    )
    for name, shift in zip(result.names, result.partition["shifts"], strict=True):
        assert f'<th scope="row">{name}</th><td>rotate {shift["rotate"][0]:.3g}</td>' in page


def test_every_shift_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    assert [name for name in SHIFTS if f"\n| `{name}` |" not in page] == []


def partitioned(result: ft.RunResult) -> FederatedData:
    settings = result.experiment
    return federate(
        load("digits"),
        partition=SHIFTED,
        clients=settings.clients,
        seed=settings.seed,
        new_clients=settings.new_clients,
    )


# --- how it is shown ---


def test_the_contact_sheet_shows_each_client_once() -> None:
    data = federate(load("digits"), partition="iid+rotate:0,90", clients=12)
    sheet = contact_sheet(data)
    assert sheet is not None
    image = Image.open(io.BytesIO(sheet))
    assert image.width == 10 * 88  # two rows, the second of two
    assert image.height == 2 * (84 + 2 * 12 + 6)
    pixels = np.asarray(image)
    x, y = data.train(1)
    shown = (x[y.tolist().index(9), 0] * 255).round().numpy()  # type: ignore[index, call-overload]
    middles = [int((k + 0.5) * 84 / 8) for k in range(8)]
    assert np.abs(pixels[np.ix_([2 + m for m in middles], [90 + m for m in middles])][..., 0] - shown).max() <= 1
    assert contact_sheet(federate(Dataset("t", torch.rand(20, 3), torch.arange(20) % 2, ("a", "b")), clients=2)) is None
