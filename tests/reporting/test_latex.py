"""table.tex, set by LaTeX: it fits the page, whatever is in it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.reporting.latex import TEXT_WIDTH, for_latex, latex, width, wrapped
from fedtailor.reporting.tables import Summary, summarize
from tests.reporting.conftest import SMALL
from tests.reporting.made_up import made_up

PDFLATEX = shutil.which("pdflatex")
needs_latex = pytest.mark.skipif(PDFLATEX is None, reason="pdflatex is not installed")
Grid = dict[str, list[dict[str, float]]]
LONG = "my_lab:AMethodWithAVeryLongNameThatNoColumnOfAnyTableCanHoldInOneLine"


def log_of(body: str, folder: Path) -> str:
    """Set a text in the plain class article, and return what LaTeX said."""
    page = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (folder / "page.tex").write_text(page, encoding="utf-8")
    assert PDFLATEX is not None
    command = [PDFLATEX, "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    return (folder / "page.log").read_text(encoding="utf-8", errors="replace")


def compared(
    folder: Path, methods: tuple[str, ...], seeds: tuple[int, ...], **settings: list[dict[str, float]]
) -> Summary:
    """A comparison of real length: 20 clients, a line for each method and choice of parameters."""
    results = []
    for seed in seeds:
        for place, method in enumerate(methods):
            for number, parameters in enumerate(settings.get(method, [{}])):
                accuracies = [
                    [0.5 + 0.4 * ((7 * place + 3 * client + seed + number) % 11) / 11 for client in range(20)]
                ]
                path = folder / f"{place}-{number}-{seed}"
                results.append(
                    made_up(
                        path, method, accuracies * 3, seed, validation_accuracy=0.5 + number / 10, parameters=parameters
                    )
                )
    return summarize(results)


EIGHT = ("local", "fedavg", "fedper", "ditto", "pgfed", "pfedmb", "fedacs", "pflego")
GRID: Grid = {
    "ditto": [{"lam": lam} for lam in (0.1, 0.25, 1.0)],
    LONG: [{"share_of_the_shared_model": n / 8} for n in (1, 3)],
}


@needs_latex
@pytest.mark.parametrize("columns", [None, ["accuracy", "worst-decile", "bytes"]])
@pytest.mark.parametrize(
    ("methods", "seeds", "settings"),
    [(EIGHT, (0,), {}), (EIGHT, (0, 1, 2), {}), (("local", "ditto", LONG, "fedavg"), (0, 1), GRID)],
)
def test_no_box_is_overfull(
    methods: tuple[str, ...], seeds: tuple[int, ...], settings: Grid, columns: list[str] | None, tmp_path: Path
) -> None:
    text = latex(compared(tmp_path / "runs", methods, seeds, **settings), columns)
    log = log_of(text, tmp_path)
    assert "Overfull" not in log
    assert "Label `tab:digits' multiply defined" not in log
    assert r"\label{tab:digits}" in text


@needs_latex
def test_the_table_of_real_runs_fits(tmp_path: Path) -> None:
    results = [ft.run(method, seed=seed, **SMALL) for method in ("local", "fedavg", "pgfed-ce") for seed in (0, 1)]
    text = latex(summarize(results))
    assert "Overfull" not in log_of(text, tmp_path)
    assert "PGFed-CE" in text
    assert text.count(r"\begin{table}") == 2
    assert r"Costs of the methods in Table~\ref{tab:digits}. Rounds and bytes until" in text
    assert r"\label{tab:digits-2}" in text


@needs_latex
def test_widths_are_those_of_latex(tmp_path: Path) -> None:
    """Never less, or a table would be too wide after all, and not much more."""
    texts = ["+10.00 ± 9.66", "< 0.001 ≈", "PGFed-CE, lam=0.25, lr=0.01", "my_lab:Half_50%", "samples/s", "WWW MMM mmm",
             "a&b#1 {~^\\$} |x|", "77.37 ✓", "360 MB", "2.5×", "ε = ∞", "中 é ß", "illi., filler"]  # fmt: skip
    boxes = "".join(rf"\setbox0=\hbox{{\small {for_latex(text)}}}\typeout{{WIDTH \the\wd0}}" for text in texts)
    found = [float(points) for points in re.findall(r"WIDTH ([\d.]+)pt", log_of(boxes, tmp_path))]
    for text, real in zip(texts, found, strict=True):
        assert real <= width(text) <= 1.3 * real + 2, text


def test_long_titles_are_continued_and_nothing_of_them_is_lost() -> None:
    for text in ("a " * 80, "x" * 200, "ditto, lam=0.1, lr=0.01, fine_tune=0, attack=sign-flip, aggregation=median"):
        lines = wrapped(text, TEXT_WIDTH / 2)
        assert max(map(width, lines)) <= TEXT_WIDTH / 2
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_captions_explain_the_columns_that_are_there(tmp_path: Path) -> None:
    text = latex(compared(tmp_path, ("local", "ditto"), (0,)), ["accuracy", "bytes"])
    assert text.count(r"\begin{table}") == 1
    assert "Worst decile" not in text
    assert "Wilcoxon" not in text
    assert "Rounds and bytes until" not in text
    assert r"method & accuracy & \begin{tabular}[b]{@{}r@{}}bytes\\in all\end{tabular} \\" in text
