"""Make the pictures of docs/images: terminals with what the real commands print, and the real report in a real browser.

    python -m docs.make_screenshots  (make screenshots)

They take about a minute. Numbers that depend on the machine (samples a second) are those of the machine that made them.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text
from torch import Tensor

from fedtailor.data import federate, load
from fedtailor.data.contact_sheet import contact_sheet
from tests.reporting.browser import Browser

IMAGES = Path(__file__).parent / "images"
COLUMNS = 100
COMPARE = "compare local fedavg ditto --clients 10 --rounds 10 --seeds 0,1"
TERMINALS = {"compare": COMPARE, "data": "data digits --partition dirichlet:0.3 --clients 20", "help": "--help"}
REPORT = {"report": "results", "report-curves": "curves", "report-clients": "clients"}  # picture: section of the page
PAGE_WIDTH = 1200
MARGIN = 20
SHIFTED = (  # partitions whose clients stand below each other
    "iid+rotate:0,90,180,270", "iid+contrast:0.5,1,2+brightness:-0.2,0,0.2", "iid+blur:0,0.5,1", "iid+noise:0,0.1,0.3",
    "iid+resolution:1,2,4", "iid+scale:0.2,1",
)  # fmt: skip
PROGRAM = Path(sys.executable).parent / "fedtailor"


def printed(command: str, directory: Path) -> str:
    """Run a command in a terminal of its own, and return all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        [PROGRAM, *command.split()],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=environment,
    )  # fmt: skip
    os.close(theirs)
    written = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    if process.wait() != 0:
        raise SystemExit(f"fedtailor {command} failed:\n{screen(written.decode())}")
    return written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux's way to say that nobody has it open any more
        return b""


def screen(written: str) -> str:
    """What is on the screen at the end: progress bars go back to their first line and write over themselves."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[\d*[A-Z]|\x1b\[\?\d+[hl]|\r?\n|\r|(?:(?!\x1b\[(?:\d*[A-Z]|\?))[^\r\n])+", written):
        if piece.endswith("\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece in ("\r", "\x1b[2K"):
            lines[row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d*)A", piece):
            row -= int(up[1] or 1)
        elif not piece.startswith("\x1b[?"):
            lines[row] += piece
    return "\n".join(lines).rstrip()


def drawing(command: str, text: str) -> str:
    """A terminal as SVG. Its font is the reader's own: rich would load one from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), (f"fedtailor {command}", "bold")))
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="fedtailor", unique_id=command.split()[0].lstrip("-"))
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", svg.replace("Fira Code", "monospace"), flags=re.MULTILINE)


def photographs(page: Path) -> Iterator[tuple[str, Image.Image]]:
    """The sections of a report as a browser shows them."""
    with Browser(PAGE_WIDTH, 900) as browser, tempfile.TemporaryDirectory() as directory:
        browser.open(page)
        whole = Path(directory) / "page.png"
        browser.figure(whole)
        with Image.open(whole) as picture:
            for name, section in REPORT.items():
                left, top, right, bottom = browser.run(
                    f"(box => [box.left, box.top + scrollY, box.right, box.bottom + scrollY].map(Math.round))"
                    f"(document.getElementById('{section}').getBoundingClientRect())"
                )
                if name == "report":  # its title stands above the first section
                    left, top, right = MARGIN, MARGIN, picture.width - MARGIN
                box = (left - MARGIN, top - MARGIN, min(right + MARGIN, picture.width), bottom + MARGIN)
                yield name, picture.convert("RGB").crop(box)


def clients_of_shifts() -> Image.Image:
    """One image of each of six clients, for each kind of shift, as `fedtailor data --picture` draws them."""
    digits = load("digits")
    assert isinstance(digits.x, Tensor)
    coloured = replace(digits, x=digits.x.expand(-1, 3, -1, -1))
    sheets = []
    for partition in SHIFTED:
        data = coloured if "scale" in partition else digits
        drawn = contact_sheet(federate(data, partition=partition, clients=6, seed=3))
        assert drawn is not None
        sheets.append(Image.open(BytesIO(drawn)))
    whole = Image.new("RGB", (sheets[0].width, sum(sheet.height for sheet in sheets)), "white")
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    return whole


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    clients_of_shifts().quantize(128).save(IMAGES / "shift-kinds.png", optimize=True)
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        for name, command in TERMINALS.items():
            (IMAGES / f"{name}.svg").write_text(drawing(command, screen(printed(command, here))), encoding="utf-8")
        printed("report comparisons/digits-1 --out report.html", here)
        for name, picture in photographs(here / "report.html"):
            picture.save(IMAGES / f"{name}.png", optimize=True)
    for path in sorted(IMAGES.iterdir()):
        print(f"{path.relative_to(IMAGES.parent)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
