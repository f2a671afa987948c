"""Numbers for Prometheus, on loopback: of a run at its server, and of a site's work.

All are counts, sizes, times and ε, from files that are written anyway; nothing of a row, and no text of a fault. A
scrape reads these files: no round waits for one.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from fedtailor._common.errors import FedtailorError
from fedtailor._common.version import __version__
from fedtailor.client.private_queries import cost_in_epsilon
from fedtailor.experiment.privacy import Privacy
from fedtailor.server.records import failures
from fedtailor.server.run_directory import RunDirectory
from fedtailor.sites.coordinator import PRESENT, STATUS
from fedtailor.sites.ledger import account_of
from fedtailor.sites.plan import Plan
from fedtailor.sites.site_file import SiteFile
from fedtailor.sites.tally import read_tally

LOOPBACK, PATH = "127.0.0.1", "/metrics"
TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """One metric, with a value for each set of labels."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    values: Sequence[tuple[dict[str, str], float]]


def of_run(run: Path, plan: Plan, ends: dict[str, float]) -> Iterator[Metric]:
    """The numbers of a run. `ends` has the end of each certificate of the server's machine, in Unix time."""
    rounds = RunDirectory(run).rounds() if (run / "rounds.jsonl").is_file() else []
    status: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        status = json.loads((run / STATUS).read_text("utf-8"))
    terms = plan.terms()
    about = {"federation": plan.name, "method": terms.method, "version": __version__}
    yield Metric("fedtailor_server_info", "gauge", "The federation, and the server's version.", [(about, 1)])
    yield _one("server_rounds_planned", "gauge", "Rounds of the plan.", terms.rounds)
    yield _one("server_rounds_total", "counter", "Rounds that are done.", len(rounds))
    yield _one("server_round_seconds_total", "counter", "Seconds of all rounds.", sum(each.seconds for each in rounds))
    sizes = [("down", sum(each.bytes_down for each in rounds)), ("up", sum(each.bytes_up for each in rounds))]
    help = "Bytes to the sites (down) and from them (up)."
    yield Metric("fedtailor_server_bytes_total", "counter", help, [({"direction": way}, size) for way, size in sizes])
    if rounds and rounds[-1].epsilon is not None:
        yield _one("server_epsilon", "gauge", "Privacy spent by this run, as epsilon.", rounds[-1].epsilon)
    sites = status.get("sites", {})
    here = [({"site": site}, float(sites.get(site) == PRESENT)) for site in plan.sites]
    yield Metric("fedtailor_server_site_present", "gauge", "1 if the site answered when it was last asked.", here)
    help = "Time of the site's last answer."
    seen = [({"site": site}, when) for site, when in status.get("seen", {}).items()]
    yield Metric("fedtailor_server_site_last_contact_timestamp_seconds", "gauge", help, seen)
    failed = failures(rounds)
    help = "Rounds in which the site took part and failed."
    of_site = [
        ({"site": site}, float(failed[number][0]) if number in failed else 0.0)
        for number, site in enumerate(plan.sites)
    ]
    yield Metric("fedtailor_server_failed_rounds_total", "counter", help, of_site)
    help = "Letters that were not answered (silent), or by a fault of this kind."
    faults = [
        ({"site": site, "kind": kind}, count)
        for site, kinds in status.get("faults", {}).items()
        for kind, count in kinds.items()
    ]
    yield Metric("fedtailor_server_faults_total", "counter", help, faults)
    yield _certificates(ends)


def of_site(site: SiteFile, plan: Plan, ends: dict[str, float]) -> Iterator[Metric]:
    """The numbers of a site's work, over all its runs."""
    tally = read_tally(site.private)
    about = {"federation": plan.name, "site": site.name, "version": __version__}
    yield Metric("fedtailor_site_info", "gauge", "The site, and its version.", [(about, 1)])
    yield _one("site_trainings_total", "counter", "Trainings that were done.", tally.rounds)
    yield _one("site_work_seconds_total", "counter", "Seconds of work on letters.", tally.seconds)
    sizes = [({"direction": "in"}, tally.bytes_in), ({"direction": "out"}, tally.bytes_out)]
    yield Metric("fedtailor_site_bytes_total", "counter", "Bytes of letters (in) and answers (out).", sizes)
    faults = [({"kind": kind}, count) for kind, count in tally.faults.items()]
    yield Metric("fedtailor_site_faults_total", "counter", "Letters answered by a fault of this kind.", faults)
    if tally.last:
        yield _one("site_last_contact_timestamp_seconds", "gauge", "Time of the last letter.", tally.last)
    if wanted := plan.terms().privacy:
        spent = cost_in_epsilon(account_of(site).cost, Privacy.parse(wanted))
        yield _one("site_epsilon", "gauge", "Privacy that all trainings of these data have cost, as epsilon.", spent)
    yield _certificates(ends)


def _one(name: str, kind: Literal["counter", "gauge"], help: str, value: float) -> Metric:
    return Metric(f"fedtailor_{name}", kind, help, [({}, value)])


def _certificates(ends: dict[str, float]) -> Metric:
    name, help = "fedtailor_certificate_end_timestamp_seconds", "End of a certificate."
    return Metric(name, "gauge", help, [({"holder": holder}, end) for holder, end in ends.items()])


def written(metrics: Iterable[Metric]) -> str:
    """Write metrics in Prometheus's text format."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.values:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := f"{float(value):.17g}", text)


@contextmanager
def exported(port: int, metrics: Callable[[], Iterable[Metric]]) -> Iterator[int]:
    """Answer GET /metrics on loopback while the block runs. Yield the port: 0 takes any that is free."""

    class Answer(BaseHTTPRequestHandler):
        server_version, sys_version = "fedtailor", ""

        def do_GET(self) -> None:
            try:
                code, content = (200, written(metrics())) if self.path == PATH else (404, f"See {PATH}.\n")
            except Exception as error:  # a file that is being written: the next scrape reads it
                code, content = 503, f"Not now: {type(error).__name__}.\n"
            body = content.encode()
            self.send_response(code)
            self.send_header("Content-Type", TYPE if code == 200 else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of each scrape."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Answer)
    except OSError as error:
        raise FedtailorError(
            f"Metrics cannot be shown on port {port} ({error.strerror}): choose another one for --metrics."
        ) from None
    server.daemon_threads = True
    with server:
        Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
