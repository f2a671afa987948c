"""Attempts against a running federation, and what refuses each (`make test-sites`). docs/security.md has the table."""

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("nvflare") is None:
    pytest.skip("the extra nvflare is not installed", allow_module_level=True)

from nvflare.lighter.utils import generate_keys

from tests.sites.attacking import Attacked, handshake
from tests.sites.loopback import impossible, wait_for

pytestmark = [pytest.mark.sites, pytest.mark.skipif(bool(impossible()), reason=impossible() or "possible")]
COORDINATOR = "coordinator@example.org"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server and two sites at work."""
    with Attacked(tmp_path_factory.mktemp("attacked")) as attacked:
        attacked.start_server()
        attacked.start_sites()
        attacked.wait_for_sites()
        yield attacked


@pytest.fixture(scope="module")
def tampered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server whose owner gave every right to admins, and whose messages do not ask sites for theirs. At south, the
    guard was taken out."""
    with Attacked(tmp_path_factory.mktemp("tampered")) as attacked:
        for file, change in (
            (attacked.kits / "server" / "kit" / "local" / "authorization.json", _everything),
            (
                attacked.root / "south" / "kit" / "local" / "resources.json",
                lambda content: content["components"].pop(0),
            ),
        ):
            content = json.loads(file.read_text())
            change(content)
            file.write_text(json.dumps(content))
        attacked.start_server(tampered=True)
        attacked.start_sites()
        attacked.wait_for_sites()
        yield attacked


def _everything(content: dict[str, Any]) -> None:
    content["permissions"] = dict.fromkeys(("project_admin", "lead"), "any")


def said(answer: Any) -> str:
    return json.dumps(answer)


def test_a_certificate_of_another_root(federation: Attacked) -> None:
    own = federation.root / "north" / "kit"
    root = own / "startup" / "rootCA.pem"
    wrong = federation.participant(own, "north", key=generate_keys()[0])
    assert handshake(federation, "own", own, root) == 0
    assert handshake(federation, "wrong", wrong, root) == 1
    assert "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate" in federation.said("server")
    assert handshake(federation, "none", None, root) == 1
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in federation.said("server")
    before = federation.said("server").count("New client north")
    federation.start_client("wrong-client", wrong, "north")
    with pytest.raises(AssertionError, match="not within"):
        wait_for(lambda: "Successfully registered" in federation.said("wrong-client"), 20, "the wrong client")
    assert federation.said("server").count("New client north") == before


def test_a_server_of_another_root(federation: Attacked) -> None:
    """The site refuses it."""
    other = federation.root / "other"
    other.mkdir()
    own = shutil.copytree(federation.root / "north" / "kit", other / "kit")
    shutil.copyfile(
        federation.participant(own, "x", key=generate_keys()[0]) / "startup" / "client.crt",
        own / "startup" / "rootCA.pem",
    )
    assert handshake(federation, "elsewhere", own, own / "startup" / "rootCA.pem") == 1
    assert "certificate verify failed" in (federation.root / "elsewhere.log").read_text(errors="replace")


def test_the_certificate_of_another_site(federation: Attacked) -> None:
    federation.start_client("as-south", federation.root / "north" / "kit", "south")
    words = "authenticated as 'north' but claimed endpoint 'south' requires identity 'south'"
    wait_for(lambda: words in federation.said("server"), 60, "the refusal")
    assert "Successfully registered" not in federation.said("as-south")


def test_a_site_that_is_not_in_the_plan(federation: Attacked) -> None:
    """It has a certificate of the root."""
    kit = federation.participant(federation.root / "north" / "kit", "stranger")
    federation.start_client("stranger", kit, "stranger")
    wait_for(lambda: "stranger is not a site of the plan" in federation.said("server"), 60, "the refusal")
    assert "Successfully registered" not in federation.said("stranger")
    assert "New client stranger" not in federation.said("server")


@pytest.mark.parametrize(
    ("role", "name"), [("member", "m@example.org"), ("project_admin", "p@example.org"), ("lead", "l@example.org")]
)
def test_a_submitter_without_the_right(role: str, name: str, federation: Attacked) -> None:
    """Its certificate is of the root; `lead` is the coordinator's role, under another name."""
    kit = federation.participant(federation.kits / "admin" / "kit", name, role)
    (answer,) = federation.admin(("submit", federation.job(f"by-{role}")), kit=kit, user=name)
    assert f"user '{name}' is not authorized for 'submit_job'" in answer


def test_the_name_of_the_coordinator_without_its_key(federation: Attacked) -> None:
    kit = federation.participant(federation.kits / "admin" / "kit", "m@example.org", "member")
    answers = federation.admin(("submit", federation.job("stolen")), kit=kit, user=COORDINATOR)
    assert answers == ["FLCommunicationError: error:client_registration"]
    assert "failed to verify client identity" in federation.said("server")


COMMANDS = (
    *("pwd north", "ls north", "cat north log.txt", "head north log.txt", "tail north log.txt", "grep north x log.txt"),
    *("sys_info client north", "report_resources client north", "report_env north"),
    *("shutdown client north", "restart client north", "configure_site_log client north DEBUG"),
)


def test_commands_of_the_coordinator_at_a_site(federation: Attacked) -> None:
    answers = federation.admin(*(("command", command) for command in COMMANDS))
    for command, answer in zip(COMMANDS, answers, strict=True):
        assert "invalid_request" in said(answer) or "not authorized" in said(answer), (command, answer)


def test_files_of_the_server(federation: Attacked) -> None:
    for answer in federation.admin(("command", "ls server"), ("command", "cat server log.txt")):
        assert "not authorized" in said(answer)


def test_shipped_code(federation: Attacked) -> None:
    job = with_code(federation, "code")
    (number,) = federation.admin(("submit", job))
    words = f"({number}): RuntimeError: Failed to deploy app 'app': BYOC not permitted"
    wait_for(lambda: words in federation.said("server"), 60, "the refusal")
    assert not (federation.root / "ran").exists()


def with_code(federation: Attacked, name: str) -> Path:
    """A job with code that writes a file."""
    job = federation.job(name)
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "sitecustomize.py").write_text(f"open({str(federation.root / 'ran')!r}, 'w')\n")
    return job


FOREIGN = [
    {"path": "subprocess.Popen", "args": {"args": ["touch", "RAN"]}},
    {"path": "nvflare.app_common.np.np_trainer.NPTrainer"},
    {"path": "fedtailor.sites.nvflare.launch.launch", "args": {"role": "client"}},
]


@pytest.mark.parametrize("place", ["client", "server"])
@pytest.mark.parametrize("component", FOREIGN, ids=lambda component: component["path"])
def test_a_foreign_class(component: dict[str, Any], place: str, federation: Attacked) -> None:
    job = federation.job(f"foreign-{place}-{FOREIGN.index(component)}")
    file = job / "app" / "config" / f"config_fed_{place}.json"
    content = json.loads(file.read_text())
    ran = federation.root / f"ran-{place}"
    content["components"] = [json.loads(json.dumps({"id": "x", **component}).replace("RAN", str(ran)))]
    file.write_text(json.dumps(content))
    before = federation.said("server").count("ComponentNotAuthorized")
    (number,) = federation.admin(("submit", job))

    def refused() -> bool:
        if place == "server":
            return federation.said("server").count("ComponentNotAuthorized") > before
        log = federation.root / "north" / "kit" / str(number) / "error_log.txt"
        return log.exists() and "ComponentNotAuthorized" in log.read_text()

    wait_for(refused, 90, "the refusal")
    assert not ran.exists()


def test_a_site_refuses_what_its_server_lets_pass(tampered: Attacked) -> None:
    """Code by the coordinator, and any job by another admin."""
    kit = tampered.participant(tampered.kits / "admin" / "kit", "p@example.org", "project_admin")
    for job, given, words in (
        (with_code(tampered, "code"), {}, "BYOC not permitted"),
        (
            tampered.job("plain"),
            {"kit": kit, "user": "p@example.org"},
            "user 'p@example.org' is not authorized for 'submit_job'",
        ),
    ):
        (number,) = tampered.admin(("submit", job), **given)
        wait_for(lambda number=number: f"({number}): " in tampered.said("server"), 60, "the refusal")  # type: ignore[misc]
        (meta,) = tampered.admin(("meta", number))
        said_by_server, *said_by_sites = meta["job_deploy_detail"][:3]
        assert said_by_server == "server: OK"
        assert all(detail.startswith(f"{name}: ") for name, detail in zip(tampered.data, said_by_sites, strict=True))
        assert all(detail.endswith(words) for detail in said_by_sites)
    assert not (tampered.root / "ran").exists()


def test_a_server_that_was_tampered_with_reads_files(tampered: Attacked) -> None:
    """NVFlare alone hands them out, as south without its guard shows; with the guard there is nobody to ask."""
    kit = tampered.participant(tampered.kits / "admin" / "kit", "q@example.org", "project_admin")
    north, south = tampered.admin(
        ("command", "cat north local/resources.json"),
        ("command", "cat south local/resources.json"),
        kit=kit,
        user="q@example.org",
    )
    assert "class_allow_list" in said(south)
    assert "class_allow_list" not in said(north)
    assert "invalid_request" in said(north)
