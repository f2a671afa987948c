"""ft.histogram: how many clients have which value, by one call."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft

MISSED = "tests.test_more_metrics:missed"
SMALL: dict[str, Any] = {"clients": 6, "rounds": 2, "epochs": 1, "model": "mlp:8", "engine": "in-process"}


def counted(figure: Any) -> list[dict[tuple[float, float], int]]:
    """The clients of each run between two edges."""
    return [
        {(low, high): int(n) for (low, high), n in zip(bars.customdata, bars.y, strict=True)} for bars in figure.data
    ]


def check(found: dict[tuple[float, float], int], values: list[float]) -> None:
    last = max(high for _, high in found)
    for (low, high), n in found.items():
        assert n == sum(low <= value < high or value == high == last for value in values)
    assert sum(found.values()) == len(values)


def test_it_counts_the_clients_of_a_run(tmp_path: Path) -> None:
    result = ft.run("ditto", metrics={"missed": MISSED}, out=tmp_path / "run", **SMALL)
    own = [metrics for _, metrics in sorted(result.per_client.items())]
    check(counted(ft.histogram(result))[0], [100 * float(metrics.accuracy or 0) for metrics in own])
    check(counted(ft.histogram(tmp_path / "run", "loss"))[0], [float(metrics.loss or 0) for metrics in own])
    figure = ft.histogram(result, "missed")
    check(counted(figure)[0], [metrics.more["missed"] for metrics in own])
    assert figure.layout.xaxis.title.text == "test missed"
    assert ft.histogram(result).layout.xaxis.title.text == "test accuracy, %"
    figure.write_html(tmp_path / "histogram.html")


def test_several_runs_share_their_edges() -> None:
    one, other = (ft.run("ditto", seed=seed, **SMALL) for seed in (0, 1))
    figure = ft.histogram([one, other])
    assert [bars.name for bars in figure.data] == ["Ditto, 1", "Ditto, 2"]
    first, second = counted(figure)
    assert list(first) == list(second)
    check(first, [100 * float(metrics.accuracy or 0) for metrics in one.per_client.values()])


def test_a_comparison_has_its_lines_over_all_seeds() -> None:
    table = ft.compare(["local", "ditto"], seeds=[0, 1], **SMALL)
    figure = ft.histogram(table)
    assert [bars.name for bars in figure.data] == ["Local", "Ditto"]
    assert [int(np.sum(bars.y)) for bars in figure.data] == [12, 12]


def test_what_cannot_be_drawn_is_one_sentence() -> None:
    result = ft.run("local", **SMALL)
    with pytest.raises(ft.FedtailorError, match="There is no metric 'acuracy': did you mean 'accuracy'"):
        ft.histogram(result, "acuracy")
    with pytest.raises(ft.FedtailorError, match="No client has a test value of the metric RMSE"):
        ft.histogram(result, "rmse")
    with pytest.raises(ft.FedtailorError, match="There is no run to draw"):
        ft.histogram([])
