"""The report in a real browser, and what `fedtailor report` says and refuses."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor._common.extras import install_command
from fedtailor.messages import Message, frame
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.page import html, prepare
from tests.cli.calling import Call, done, refusal
from tests.helpers import rewrite
from tests.reporting.browser import CHROMIUM, Browser
from tests.reporting.conftest import SMALL
from tests.reporting.made_up import made_up

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
HOSTILE = "</script><img src='http://example.com/x'>\"&$%{x}"


@pytest.fixture(scope="module")
def page(runs: Path) -> Path:
    path = runs.parent / "report.html"
    path.write_text(html(prepare(read_runs([runs]))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(page: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.open(page)
        yield browser


@pytest.fixture
def browser(opened: Browser) -> Iterator[Browser]:
    """The open page, on which no test may leave an error behind."""
    yield opened
    opened.run("1")  # hear what was said until now
    assert opened.messages == []


def loads(text: str) -> list[str]:
    """What the tags of a page would load from elsewhere."""
    found = re.findall(
        r"<(?:script|link|img|iframe|a|form|object|embed)\b[^>]*?(?:src|href|action|data)=[\"']?([^\"'> ]+)", text
    )
    return [address for address in found if not address.startswith(("#", "data:"))]


def test_the_page_is_one_small_file_that_loads_nothing(page: Path) -> None:
    assert page.stat().st_size < 6_000_000
    text = page.read_text(encoding="utf-8")
    assert loads(text) == []
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert text == html(prepare(read_runs([page.parent / "runs"])))  # the same runs give the same page


@needs_browser
def test_all_figures_are_drawn_without_a_word_on_the_console_or_a_request(browser: Browser, page: Path) -> None:
    charts = browser.run(
        """[...document.querySelectorAll(".chart")].map((chart) => [
          chart.id, chart.matches(".js-plotly-plot"), chart.clientWidth > 150,
          chart.querySelectorAll(".scatterlayer .trace, .barlayer .trace, .heatmaplayer .hm image").length > 0,
        ])"""
    )
    assert (
        len(charts) == len({chart[0] for chart in charts}) == int(browser.run("document.documentElement.dataset.drawn"))
    )
    assert len(charts) > 25
    assert [chart for chart in charts if chart[1:] != [True, True, True]] == []
    assert {request for request in browser.requests if not request.startswith("data:")} == {page.as_uri()}
    assert browser.run("document.getElementById('undrawn')") is None
    buttons = browser.run("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title.split(' ')[0])")
    assert set(buttons) == {"Download", "Zoom", "Pan", "Reset"}  # and nothing that would send a figure away


@needs_browser
def test_a_click_on_the_legend_hides_a_method_everywhere(browser: Browser) -> None:
    curve = "document.querySelectorAll('#{} .scatterlayer .trace').length"
    charts = ("chart-curves-rounds-0", "chart-curves-bytes-1", "chart-gains-0")
    bars = "getComputedStyle(document.querySelector('.panel[data-choice=pgfed]')).display"
    before = [browser.run(curve.format(chart)) for chart in charts]
    button = "#curves-rounds .legend button[data-choice=pgfed]"
    browser.click(button)
    after = [browser.run(curve.format(chart)) for chart in charts]
    assert [a - b for a, b in zip(before, after, strict=True)] == [2, 2, 2]  # curve and band, points and line
    assert browser.run(bars) == "none"
    assert browser.run(f"document.querySelector('{button}').ariaPressed") == "false"
    browser.click(button)
    assert [browser.run(curve.format(chart)) for chart in charts] == before
    assert browser.run(bars) == "block"
    browser.run(f"document.querySelector('{button}').dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.run(
        "[...document.querySelectorAll('#curves-rounds [aria-pressed=true]')].map(b => b.textContent)"
    ) == ["PGFed"]
    browser.run(f"document.querySelector('{button}').dispatchEvent(new MouseEvent('dblclick'))")
    assert [browser.run(curve.format(chart)) for chart in charts] == before


@needs_browser
def test_tabs_and_rounds_can_be_chosen(browser: Browser) -> None:
    visible = "filter(f => getComputedStyle(f).visibility === 'visible')"
    seen = f"[...document.querySelectorAll('#curves figure')].{visible}.map(f => f.id)"
    assert browser.run(seen) == ["curves-rounds"]
    browser.click("#tab-curves-time")
    assert browser.run(seen) == ["curves-time"]
    browser.click("#tab-curves-rounds")
    shown = "JSON.stringify(document.getElementById('chart-pfedmb-alpha-0').data[0].z)"
    last = browser.run(shown)
    move = """(() => {
      const input = document.querySelector("#pfedmb-alpha input");
      input.value = %d;
      input.dispatchEvent(new Event("input"));
    })()"""
    browser.run(move % 0)
    assert browser.run("document.querySelector('#pfedmb-alpha output').textContent") == "1"
    assert browser.run(shown) != last
    browser.run(move % 2)
    assert browser.run(shown) == last


@needs_browser
def test_a_click_on_a_column_sorts_the_clients(browser: Browser) -> None:
    shown = "[...document.querySelectorAll('.sortable tbody tr')].map(row => Number(row.cells[{}].dataset.value))"
    head = "#clients .sortable th:nth-child({}) button"
    first = browser.run(shown.format(3))
    browser.click(head.format(4))
    assert browser.run(shown.format(3)) == sorted(first) != first
    browser.click(head.format(4))
    assert browser.run(shown.format(3)) == sorted(first, reverse=True)
    browser.click(head.format(4))
    assert browser.run(shown.format(3)) == first


@needs_browser
def test_light_and_dark_and_paper(browser: Browser) -> None:
    def looks() -> list[str]:
        return browser.run(
            """[getComputedStyle(document.body).backgroundColor,
                document.getElementById("chart-clients-0").layout.template.layout.font.color,
                document.getElementById("chart-partition-seed0-0").data[0].colorscale[0][1]]"""
        )

    light = ["rgb(255, 255, 255)", "#1c2026", "#ffffff"]
    assert looks() == light
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.until("document.getElementById('chart-clients-0').layout.template.layout.font.color === '#e7eaee'")
    assert looks() == ["rgb(20, 23, 28)", "#e7eaee", "#1c2027"]
    # At once, as the browser prints right after the event: light, all tabs, nothing wider than the paper.
    hidden, wide = browser.run(
        """(() => {
          dispatchEvent(new Event("beforeprint"));
          const charts = [...document.querySelectorAll(".chart")];
          return [
            [...document.querySelectorAll("figure")].filter((f) => getComputedStyle(f).visibility !== "visible").length,
            charts.filter((c) => Math.max(c.querySelector("svg").clientWidth, c.clientWidth) > c.parentNode.clientWidth)
              .map((c) => c.id).concat(document.body.clientWidth > 680 ? ["body"] : []),
          ];
        })()"""
    )
    assert (hidden, wide) == (0, [])
    assert looks() == light
    assert browser.run("document.querySelector('details').open") is True
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert looks()[0] == "rgb(20, 23, 28)"
    browser.call("Emulation.setEmulatedMedia", features=[])
    browser.until("document.getElementById('chart-clients-0').layout.template.layout.font.color === '#1c2026'")


@needs_browser
def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    for name, method in (("a", "local"), ("b", f"own:{HOSTILE}")):
        made_up(tmp_path / "runs" / name, method, [[0.5, 0.6, 0.7], [0.6, 0.7, 0.8]])
        named = {"clients": [HOSTILE, "b", "c"], "classes": [HOSTILE, "<b>bold</b>"]}
        rewrite(tmp_path / "runs" / name / "partition.json", **named)
    page = tmp_path / "report.html"
    page.write_text(html(prepare(read_runs([tmp_path]))), encoding="utf-8")
    assert loads(page.read_text()) == []
    with Browser() as browser:
        browser.open(page)
        named = "[...document.querySelectorAll('#chart-partition-seed0-0 .%stick')].map(tick => tick.textContent)"
        assert HOSTILE[:15] + "…" in browser.run(named % "y")
        assert browser.run(named % "x") == [HOSTILE[:15] + "…", "<b>bold</b>"]
        bars = "[...document.querySelectorAll('#chart-clients-0 .xtick')].map(tick => tick.textContent)"
        assert browser.run(bars) == [HOSTILE[:15] + "…", "b", "c"]
        assert browser.run("document.querySelector('#clients th.name').title") == HOSTILE
        assert browser.run("document.querySelectorAll('.legend button')[1].textContent") == HOSTILE
        assert browser.messages == []
        assert [request for request in browser.requests if request.startswith("http")] == []


# --- the command ---


def test_report_makes_the_page_and_the_figures(call: Call, tmp_path: Path) -> None:
    for method in ("local", "fedavg"):
        ft.run(method, out=tmp_path / "compared" / "runs" / method, **SMALL)
    said = done(call("report", "compared", "--out", "pages/digits.html", "--figures", "paper"))
    assert re.fullmatch(
        r"2 runs in pages/digits\.html \(\d\.\d+ MB\)\n6 figures in paper, each as png, pdf, svg\n", said
    )
    text = Path("pages/digits.html").read_text(encoding="utf-8")
    assert "<h1>Local and FedAvg on digits</h1>" in text
    for words in (
        "training samples of digits (10 classes) at 6 clients. Partition: dirichlet:0.3, each class by Dirichlet(0.3)",
        "3 rounds; all clients take part in each.",
        "1 epoch of local work in batches of 10 at learning rate 0.1 with the network mlp:8.",
        "personal models, all clients, mean over clients, last round",
        "gain over Local",
    ):
        assert words in text
    names = {path.stem for path in Path("paper").iterdir()}
    assert names == {"curves-rounds", "curves-bytes", "curves-time", "clients", "gains", "partition-seed0"}
    assert len(list(Path("paper").iterdir())) == 18


def test_columns_are_chosen_for_the_page_and_the_tables(call: Call, tmp_path: Path) -> None:
    for method in ("local", "pgfed-ce"):
        made_up(tmp_path / "compared" / "runs" / method, method, [[0.5, 0.6], [0.9, 0.8]])
    said = done(call("report", "compared", "--tables", "paper/tables", "--columns", "bytes,accuracy, gain"))
    assert said.endswith("table.txt, table.md, table.tex in paper/tables\n")
    head = "| method | bytes in all | accuracy | gain over Local |"
    lines = Path("paper/tables/table.md").read_text().splitlines()
    assert lines[2] == head
    assert lines[5].startswith("| PGFed-CE | 300 B | **85.00** |")
    assert "Worst decile" not in lines[-1]
    page = Path("report.html").read_text(encoding="utf-8")
    results = page.partition('<section id="results">')[2].partition("</section>")[0]
    assert re.findall(r'<th scope="col">([^<]*)</th>', results) == head.strip("| ").split(" | ")
    assert "Worst decile" not in results
    wrong = refusal(call, "report", "compared", "--columns", "accuracy,gian")
    assert wrong.startswith("There is no column 'gian': did you mean 'gain', of metric, epsilon, ")
    assert "known are accuracy, auc, " in refusal(call, "report", "compared", "--columns", "???")
    assert "nothing to show in the columns epsilon" in refusal(call, "report", "compared", "--columns", "epsilon")
    assert "takes names with commas" in refusal(call, "report", "compared", "--columns", " , ")
    assert "is a file" in refusal(call, "report", "compared", "--tables", "report.html")


def test_a_comparison_keeps_its_order_and_its_target(call: Call, tmp_path: Path) -> None:
    for method in ("fedavg", "ditto", "local"):
        made_up(tmp_path / "compared" / "runs" / method, method, [[0.5, 0.6], [0.9, 0.8]])
    Path("compared/comparison.toml").write_text('methods = ["ditto", "local", "fedavg"]\ntarget = 0.7\n')
    done(call("report", "compared"))
    text = Path("report.html").read_text(encoding="utf-8")
    assert "<h1>Ditto, Local and FedAvg on digits</h1>" in text
    assert "rounds to 70 %" in text


def test_unfinished_and_broken_runs_are_named_and_the_rest_is_reported(call: Call, runs: Path, tmp_path: Path) -> None:
    for name in ("local-0", "fedavg-0", "pgfed-0", "pfedmb-0", "apfl-0", "ifca-0"):
        shutil.copytree(runs / name, tmp_path / "runs" / name)
    lines = Path("runs/fedavg-0/rounds.jsonl").read_text().splitlines(keepends=True)
    Path("runs/fedavg-0/rounds.jsonl").write_text(lines[0])
    Path("runs/pgfed-0/partition.json").write_text('{"data": ')
    Path("runs/pfedmb-0/rounds.jsonl").unlink()
    for name in ("fedavg-0", "pfedmb-0"):
        Path(f"runs/{name}/result.json").unlink()
    Path("runs/apfl-0/clients.jsonl").write_text('{"round": 1, "results": {"0": {}}}\n' * 3)
    observed = Path("runs/ifca-0/observed/round-3.safetensors")
    observed.write_bytes(observed.read_bytes()[:20])
    answer = call("report", "runs")
    assert (answer.code, answer.out.split(" (")[0]) == (0, "3 runs in report.html")
    text = Path("report.html").read_text(encoding="utf-8")
    warnings = answer.err.splitlines()
    assert len(warnings) == 5
    for words in (
        "runs/fedavg-0 is not finished (1 of 3 rounds)",
        "runs/pfedmb-0 is not finished (0 of 3 rounds): it has nothing to show yet.",
        "runs/pgfed-0 is left out, as it is broken: runs/pgfed-0/partition.json is damaged",
        "runs/apfl-0 is left out, as it is broken: runs/apfl-0/clients.jsonl is damaged",
        "The diagnostics of IFCA are left out: runs/ifca-0/observed/round-3.safetensors cannot be read",
    ):
        assert any(warning.startswith(f"Warning: {words}") for warning in warnings), words
        assert f"<li>{words}" in text
    assert "<em>1 of 3</em>" in text
    assert "<h1>Local, FedAvg and IFCA on digits</h1>" in text


@pytest.mark.parametrize("tensors", [{"change": torch.zeros(3)}, {"alpha": torch.zeros(3, 3)}])
def test_diagnostics_that_are_not_the_methods_are_left_out(runs: Path, tmp_path: Path, tensors: Message) -> None:
    shutil.copytree(runs / "pgfed-0", run := tmp_path / "run")
    (run / "observed" / "round-3.safetensors").write_bytes(frame(tensors, sender="method", round=3))
    said = "The diagnostics of PGFed are left out: the tensors of its rounds are not the ones"
    with pytest.warns(UserWarning, match=said):
        page = ft.report(run, to=tmp_path / "report.html")
    assert said in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("partition.json", {"clients": 5}),
        ("partition.json", {"train": [[10, 10]]}),
        ("partition.json", {"new": [7]}),
        ("rounds.jsonl", {"bytes_up": None}),
        ("rounds.jsonl", {"accuracy": "high"}),
        ("rounds.jsonl", {"participants": [0, 7]}),
        ("clients.jsonl", {"round": 2}),
        ("clients.jsonl", {"results": {"7": {"test": {"accuracy": 0.5, "loss": 1.0}}}}),
        ("clients.jsonl", {"results": {"0": {"validation": {"accuracy": 0.5, "loss": 1.0}}}}),
    ],
)
def test_a_record_of_another_shape_makes_a_broken_run(file: str, changes: dict[str, Any], tmp_path: Path) -> None:
    for name in ("local", "ditto"):
        made_up(tmp_path / name, name, [[0.5, 0.6]])
    path = tmp_path / "ditto" / file
    rewrite(path, **changes)
    runs = read_runs([tmp_path])
    assert [result.experiment.method for result in runs.results] == ["local"]
    assert runs.broken[tmp_path / "ditto"].startswith(f"{path} is damaged (")
    assert "checksum" not in runs.broken[tmp_path / "ditto"]


def test_what_cannot_be_reported_is_refused(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(tmp_path / "a", "local", [[0.5, 0.6]])
    made_up(tmp_path / "b", "fedavg", [[0.5, 0.6]], data="synthetic", fingerprint="other")
    made_up(tmp_path / "c", "fedavg", [[0.5, 0.6]], evaluation={"choose": "best-test"})
    made_up(tmp_path / "d", "fedavg", [[0.5, 0.6]], fingerprint="other")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "experiment.toml").write_text("method = ")
    (tmp_path / "empty").mkdir()
    assert 'data is "digits" in a and "synthetic" in b' in refusal(call, "report", "a", "b")
    assert 'evaluation.choose is "last" in a and "best-test" in c' in refusal(call, "report", "a", "c")
    assert "the samples themselves are others" in refusal(call, "report", "a", "d")
    assert refusal(call, "report", "nowhere").startswith("There is no directory nowhere")
    assert refusal(call, "report", "empty").startswith("There is no run in empty")
    assert refusal(call, "report", "broken").startswith("There is nothing to report: broken is not a run directory")
    assert "is a directory" in refusal(call, "report", "a", "--out", "empty")
    assert "is a file" in refusal(call, "report", "a", "--figures", "a/experiment.toml")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert install_command("figures") in refusal(call, "report", "a", "--figures", "figures")
