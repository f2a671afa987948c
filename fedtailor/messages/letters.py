"""Letters between the server and a site: one safetensors file each, with a JSON header. Nothing is pickled, and nothing
is believed: who reads a letter compares all that it says with what was asked.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import (
    NEVER,
    Agree,
    Evaluate,
    EvaluateShared,
    Masked,
    Measured,
    Message,
    Metrics,
    Open,
    Reply,
    Request,
    Secure,
    Shares,
    Train,
    copied,
    frame,
    message_bytes,
    read_frame,
)

ASKED: dict[str, type[Request]] = {
    "train": Train, "shares": Shares, "masked": Masked, "agree": Agree, "open": Open,
    "evaluate": Evaluate, "evaluate shared": EvaluateShared,
}  # fmt: skip
# The kinds of faults that a site tells. What exactly went wrong may have a patient's data in it: it stays in the log.
FAULTS = {
    "state": "the state that the server asks for is not there: the site has lost it, or is another one",
    "work": "its work failed: the site's own log says why",
    "numbers": "training gave NaN or infinite numbers",
    "memory": "it ran out of memory",
    "refused": "the site does not allow what was asked: its own log says what",
    "data": "its data do not fit the federation: the site's own log says why",
    "changed": "its data have changed since it joined",
    "letter": "it could not use what it was sent: the site's own log says why",
    "range": "a number of its upload does not fit into secure aggregation",
    "secure": "it did not go on with secure aggregation: the site's own log says why",
}


LARGEST_FAULT = 4096  # bytes of an answer that tells a fault


class FaultError(FedtailorError):
    """A fault of a known kind, at a site."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Letter:
    """A kind, a header of plain values, and named tensors."""

    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    tensors: Message = field(default_factory=dict)

    def pack(self) -> bytes:
        """Write it as one safetensors file."""
        return frame(self.tensors, kind=self.kind, **self.header)

    def text(self, name: str) -> str:
        """An entry of the header that must be text."""
        if not isinstance(value := self.header.get(name), str):
            raise FedtailorError(f"The letter says no {name}.")
        return value

    def share(self) -> float:
        """The share of its steps that a client is to take: all, where the letter says nothing."""
        value = self.header.get("share", 1.0)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
            raise FedtailorError("The letter says no share of the steps.")
        return float(value)

    def number(self, name: str) -> int:
        """An entry of the header that must be a whole number from 0."""
        value = self.header.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise FedtailorError(f"The letter says no {name}.")
        return value


def read_letter(content: bytes, what: str = "The letter") -> Letter:
    """Read a letter; refuse anything else. The tensors are copies: in a letter they lie at any address."""
    tensors, header = read_frame(content, what)
    header.pop("checksum", None)
    if not isinstance(kind := header.pop("kind", None), str):
        raise FedtailorError(f"{what} cannot be read: it says no kind.")
    return Letter(kind, header, copied(tensors))


# --- requests and replies ---


def as_letter(request: Request, run: str, durable: int) -> Letter:
    """Write a request for one client. `durable` is the version that the server's last checkpoint names."""
    asked = next(name for name, kind in ASKED.items() if type(request) is kind)
    header = {"run": run, "asked": asked, "round": request.round, "client": request.client}
    header |= {"accepted": request.version, "durable": durable}
    if isinstance(request, Train):
        header |= {"measure": int(request.measure), "share": request.share}
    return Letter("work", header, request.message)


def as_request(letter: Letter) -> tuple[Request, int]:
    """Read a request, and the durable version."""
    kind = ASKED.get(letter.text("asked"))
    if kind is None:
        raise FaultError("refused", f"A site does not answer {letter.text('asked')!r}.")
    more = {"measure": bool(letter.number("measure")), "share": letter.share()} if kind is Train else {}
    message = dict(letter.tensors)
    request = kind(letter.number("round"), letter.number("client"), message, letter.number("accepted"), **more)
    return request, letter.number("durable")


def as_answer(letter: Letter, site: str, reply: Reply, fault: str = "") -> Letter:
    """Write the answer to a letter of work: of a fault, nothing but its kind."""
    header = {"site": site, **{name: letter.header[name] for name in ("run", "asked", "round", "client")}}
    if fault:
        return Letter("answer", {**header, "fault": fault})
    measured = [{split: _told(metrics) for split, metrics in of.items()} for of in reply.measured]
    header |= {"version": reply.version, "measured": measured}
    header |= {"differentiated": reply.differentiated, "seconds": round(reply.seconds, 3)}
    return Letter("answer", header, reply.upload)


def fault_letter(site: str, kind: str) -> Letter:
    """Write that a site has a fault of this kind."""
    return Letter("answer", {"site": site, "fault": kind})


def as_reply(content: bytes, request: Request, run: str, site: str) -> Reply:
    """Read an answer. One that is not what was asked for becomes a reply with an error: nothing of it is used."""
    try:
        letter = answer_of(content, site)
        asked = as_letter(request, run, NEVER).header
        for name in ("run", "asked", "round", "client"):
            if letter.header.get(name) != asked[name]:
                raise FedtailorError(f"Its {name} is not the one that was asked for.")
        version = letter.number("version")
        if version not in (NEVER, request.round if isinstance(request, Train) else NEVER):
            raise FedtailorError("Its state is of another round than the one that was asked for.")
        seconds = letter.header.get("seconds")
        return Reply(
            request.clients,
            dict(letter.tensors) if isinstance(request, Train | Secure) else {},
            version,
            _measured(letter.header.get("measured")),
            message_bytes(letter.tensors),
            letter.number("differentiated"),
            float(seconds) if isinstance(seconds, (int, float)) else 0.0,
        )
    except FaultError as fault:
        return Reply(request.clients, error=str(fault))
    except FedtailorError as error:
        return Reply(request.clients, error=f"its answer is not used: {str(error).rstrip('.')}")


def answer_of(content: bytes, site: str) -> Letter:
    """Read a site's answer; its fault is an error in our own words, and an answer of another site is refused."""
    letter = read_letter(content, "The answer")
    if letter.kind != "answer" or letter.header.get("site") != site:
        raise FedtailorError("It is not of this site.")
    if fault := letter.header.get("fault"):
        kind, _, upload = str(fault).partition(":")
        named = f" ({upload})" if kind == "range" and upload.isidentifier() and len(upload) <= 40 else ""
        raise FaultError("site", FAULTS.get(kind, FAULTS["work"]) + named)
    return letter


def fault_of(content: bytes) -> str:
    """The kind of the fault that an answer tells; the empty text if it tells none. An answer with tensors has none."""
    if len(content) > LARGEST_FAULT:
        return ""
    try:
        fault = str(read_letter(content).header.get("fault", ""))
    except FedtailorError:
        return "letter"
    return fault if fault in FAULTS or not fault else "work"


def _told(metrics: Metrics) -> dict[str, Any]:
    return {name: value for name, value in asdict(metrics).items() if value not in (None, {})}


_MEASURED: TypeAdapter[list[Any]] = TypeAdapter(list[dict[Literal["train", "validation", "test"], Metrics]])


def _measured(plain: Any) -> list[Measured]:
    """Read the metrics of an answer."""
    try:
        if any(not set(of) <= set(Metrics.__slots__) for each in plain for of in each.values()):
            raise ValueError
        return _MEASURED.validate_python(plain)
    except (ValidationError, ValueError, TypeError, AttributeError):
        raise FedtailorError("Its metrics are none.") from None
