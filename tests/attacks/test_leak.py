"""Attacks on real clients' uploads: what is recovered, from whom, and what the record says of it."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedtailor as ft
from fedtailor.attacks.inversion import Attack, read_labels, total_variation
from fedtailor.attacks.leakage import Leakage, picture
from fedtailor.attacks.study import Question
from fedtailor.engines.preparation import partition_data
from tests.attacks.parts import SMALL, matched, study

COSINE = Attack("cosine", 150, tv=0.0)


def leaked(*methods: str, **options: Any) -> Leakage:
    return ft.leak(methods, **{**SMALL, "inversion": "analytic", **options})


def attacked(method: str, attack: Attack = COSINE, unroll: int = 10, **settings: Any) -> Leakage:
    return study(method, question=Question(attack, victims=2, unroll=unroll), **settings).run()


# --- what leaks ---


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pflego", "pfedmb", "fedacs", "pgfed"])
@pytest.mark.parametrize("epochs", [1, 5])
def test_one_sample_is_the_quotient_of_two_gradients(method: str, epochs: int) -> None:
    """∂W = δ xᵀ, ∂b = δ: of any sum of these, whatever the head and however many steps."""
    found = leaked(method, epochs=epochs, victims=3, lr=0.01)
    (row,) = found.rows
    assert max(score.mse for score in row.scores) < 1e-7
    assert found.verdict(row) == "all 3 copied"


def test_the_label_of_one_sample_is_exact() -> None:
    """iDLG: in untrained networks and in trained ones; not where the head stays at home."""
    for settings in ({}, {"round": 3, "steps": 1}):
        fedavg, pgfed, fedper = leaked("fedavg", "pgfed", "fedper", victims=5, **settings).rows
        assert (fedavg.labels, pgfed.labels, fedper.labels) == (1.0, 1.0, None)


def test_labels_of_several_samples_are_counted() -> None:
    made = study("fedavg", question=Question(Attack("idlg"), samples=5), steps=1, partition="iid")
    matching, _, _, _, _ = matched(made)
    read = read_labels(matching, made.samples)
    assert read is not None
    assert sorted(read.tolist()) == sorted(made.data.train(made.victims[0])[1].tolist())


@pytest.mark.parametrize(
    "attack", [Attack("dlg", 60, 6), Attack("idlg", 60, 6), COSINE], ids=lambda attack: attack.kind
)
def test_every_attack_copies_one_sample(attack: Attack) -> None:
    found = study("fedavg", question=Question(attack), steps=1).run()
    assert found.verdict(found.rows[0]) == "copied"
    assert found.rows[0].labels == 1.0


@pytest.mark.slow
def test_pgfeds_gradient_tells_after_five_epochs_what_fedavg_tells_after_one_step() -> None:
    one_step, gradient = attacked("fedavg", steps=1).rows[0], attacked("pgfed").rows[0]
    assert max(one_step.mse, gradient.mse) < 1e-7
    assert torch.allclose(one_step.guessed, gradient.guessed, atol=1e-3)
    mean_gradient, followed = attacked("fedavg", unroll=1).rows[0], attacked("fedavg").rows[0]
    assert mean_gradient.mse > 1e4 * gradient.mse  # five epochs as if they were one step
    assert gradient.mse < followed.mse < 1e-2 * mean_gradient.mse  # step by step


@pytest.mark.slow
def test_an_unknown_head_does_not_hide_one_sample_but_its_label() -> None:
    found = attacked("pflego")
    row, known = found.rows[0], attacked("fedavg", steps=1).rows[0]
    assert found.counted(row)[0] == 2
    assert row.mse > known.mse
    assert row.labels == 0.0


def test_a_later_round() -> None:
    row = attacked("pgfed", Attack("analytic")).rows[0]
    later = study("pgfed", question=Question(Attack("analytic"), victims=2, round=3)).run().rows[0]
    assert not torch.equal(row.guessed, later.guessed)  # from another gradient
    assert later.mse < 1e-6


def test_samples_that_are_no_images() -> None:
    """PSNR and SSIM are of images alone."""
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 6, generator=generator), torch.arange(20) % 3) for _ in range(3)]
    found = ft.leak("fedavg", data=clients, model="mlp:20", inversion="analytic", samples=1)
    assert (found.rows[0].psnr, found.rows[0].ssim) == (None, None)
    assert found.rows[0].mse < 1e-9
    assert found.verdict(found.rows[0]) == "copied"
    assert "mean sample" in str(found)


def test_the_client_has_its_samples_and_the_others_have_theirs() -> None:
    made = study("fedavg", question=Question(samples=2, victims=2))
    whole = partition_data(made.experiments[0])
    assert made.data.n_samples.tolist() == [2, 2, *whole.n_samples.tolist()[2:]]
    for client in range(5):
        (x, y), (all_x, all_y) = made.data.train(client), whole.train(client)
        assert torch.equal(x, all_x[-len(y) :])
        assert torch.equal(y, all_y[-len(y) :])


# --- the same numbers; the baselines; the record ---


def test_the_same_call_gives_the_same_numbers() -> None:
    one, other = (leaked("fedavg", "pflego", inversion="cosine", iterations=20, restarts=2).plain() for _ in range(2))
    for plain in (one, other):
        for row in plain["methods"]:
            row.pop("seconds")
    assert one == other
    third = leaked("fedavg", "pflego", inversion="cosine", iterations=20, restarts=2, seed=1).plain()
    assert third["methods"][0]["mse"] != one["methods"][0]["mse"]


def test_the_best_restart_counts() -> None:
    rows = [attacked("fedavg", Attack("idlg", 15, restarts), steps=1).rows[0] for restarts in (1, 4)]
    distances = [row.distance for row in rows]
    assert distances[0] is not None
    assert distances[1] is not None
    assert distances[1] < distances[0]


def test_the_mean_image_is_that_of_all_training_samples() -> None:
    made = study("fedavg", question=Question(victims=2))
    found = made.begin()
    x = np.concatenate([np.asarray(made.data.train(client)[0]) for client in range(5)]).astype(np.float64)
    true = np.concatenate([np.asarray(made.data.train(client)[0]) for client in (0, 1)])
    assert np.allclose(found.baselines[0].guessed.numpy(), x.mean(0), atol=1e-6)
    assert found.baselines[0].mse == pytest.approx(((true - x.mean(0)) ** 2).mean(), rel=1e-5)
    assert [row.title for row in found.baselines] == ["mean image", "noise"]


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[[[0.0, 1.0], [1.0, 1.0]]]])
    assert total_variation(x).item() == pytest.approx(0.5 + 0.5)


def test_the_record(tmp_path: Path) -> None:
    found = leaked("fedavg", "pgfed", victims=2, out=tmp_path / "new/leak")
    plain = json.loads((tmp_path / "new/leak/leakage.json").read_text("utf-8"))
    assert plain == json.loads(json.dumps(found.plain()))
    assert [row["method"] for row in plain["methods"]] == ["fedavg", "pgfed"]
    assert [row["copies"] for row in plain["methods"]] == [2, 2]
    assert len(plain["methods"][0]["samples"]) == 2
    text = (tmp_path / "new/leak/leakage.md").read_text("utf-8")
    assert found.markdown() in text
    assert "| fedavg | the model's change over 5 steps |" in text
    assert "at least half of the way in SSIM" in text
    assert (tmp_path / "new/leak/leakage.png").read_bytes() == picture(found)


def test_the_picture_has_the_originals_above_the_reconstructions() -> None:
    found = leaked("fedavg", victims=2)
    image = np.asarray(Image.open(BytesIO(picture(found))).convert("L")).astype(float) / 255
    side, gap = 56, 4  # digits of 8 × 8, seven times as large
    assert image.shape[0] == 4 * (side + gap) + gap  # originals, mean image, noise, FedAvg
    for row, batch in ((0, found.true), (1, found.baselines[0].guessed), (3, found.rows[0].guessed)):
        top, left = gap + row * (side + gap), image.shape[1] - 2 * (side + gap)
        drawn = image[top + 3 : top + side : 7, left + 3 : left + side : 7]
        assert np.allclose(drawn, batch[0, 0].numpy(), atol=0.003)


# --- what is refused ---


@pytest.mark.parametrize(
    ("methods", "options", "sentence"),
    [
        ("local", {}, "Local uploads nothing: there is nothing to invert."),
        ("fedavg", {"inversion": "dgl"}, "There is no inversion 'dgl': did you mean 'dlg'?"),
        ("fedavg", {"samples": 0}, "samples is 0: give 1 or more."),
        ("fedavg", {"samples": 100}, "has 20 training samples, not 100: take fewer --samples"),
        ("fedavg", {"victims": 6}, "5 clients take part in round 1, so 6 cannot be attacked"),
        ("fedavg", {"restarts": 0}, "at least one iteration and one restart"),
        ("fedavg", {"iterations": 0}, "at least one iteration and one restart"),
        ("fedavg", {"tv": -1.0}, "The weight of the total variation is -1.0: give 0 or more."),
        ("fedavg", {"samples": 2}, "The analytic inversion is for one sample"),
        ("fedavg", {"model": "resnet"}, "whose first layer is dense and has a bias"),
        ("fedavg", {"optimizer": "adam"}, "Changes by adam are no sums of gradients"),
        ("fedavg", {"parameters": {}}, "give method_parameters"),
        ("fedavgg", {}, "There is no method 'fedavgg': did you mean 'fedavg'?"),
    ],
)
def test_bad_input(methods: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ft.FedtailorError) as error:
        leaked(methods, **options)
    assert sentence in str(error.value)


def test_regression_is_refused() -> None:
    clients = [(torch.randn(20, 3), torch.randn(20)) for _ in range(2)]
    with pytest.raises(ft.FedtailorError, match=r"loss cross-entropy is for classes"):
        ft.leak("fedavg", data=clients)


# --- under differential privacy ---


def test_noise_of_the_server_hides_nothing_from_it() -> None:
    """It receives the upload before it adds the noise."""
    plain, private = (leaked("fedavg", privacy=how).rows[0] for how in (None, "client, clip=1000, noise=1"))
    assert private.mse < 1e-7
    assert torch.allclose(plain.guessed, private.guessed, atol=1e-3)


def test_noise_of_the_clients_hides_the_sample() -> None:
    found = leaked("fedavg", privacy="client, clip=1, noise=1, by=clients")
    assert found.verdict(found.rows[0]) == "not recognisable"


def test_noise_on_samples_gradients_hides_the_sample() -> None:
    found = leaked("fedavg", privacy="sample, clip=1, noise=1")
    assert found.verdict(found.rows[0]) == "not recognisable"


@pytest.mark.parametrize("how", ["client, clip=1, noise=1e-6, by=clients", "sample, clip=1, noise=1e-6"])
def test_clipping_alone_hides_nothing(how: str) -> None:
    assert leaked("fedavg", privacy=how).rows[0].mse < 1e-3
