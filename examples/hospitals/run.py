"""Run the whole federation on this machine, with real certificates: what each engineer types, and what they see.

    python examples/hospitals/run.py [DIRECTORY]

Each hospital has a directory of its own below DIRECTORY (by default runs/hospitals), and so has the coordinator. What
goes from one to another is copied, as if it were sent. Everything that is started is ended. NVFlare's server listens on
all interfaces: so all of it runs in a network namespace with nothing but loopback, where the system allows one.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOSPITALS = ("harbour", "hill", "lake", "valley")
LATER = "meadow"
INSIDE = "HOSPITALS_INSIDE"  # set where this runs in its own namespace
GRACE = 30  # seconds for a site to end


def main() -> None:
    """Run it all."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/hospitals").resolve()
    if INSIDE not in os.environ:
        _enter_namespace()
    began = time.monotonic()
    shutil.rmtree(root, ignore_errors=True)
    coordinator = root / "coordinator"
    coordinator.mkdir(parents=True)
    shutil.copy(HERE / "federation.toml", coordinator)

    title("Invented patients for five hospitals")
    subprocess.run([sys.executable, HERE / "make_data.py", root], check=True)
    for name in (*HOSPITALS, LATER):
        rows = len((root / name / "patients.csv").read_text("utf-8").splitlines()) - 1
        print(f"{name}/patients.csv: {rows} patients")

    title("The coordinator makes a directory for each role, and sends each hospital its own")
    show(coordinator, "deploy plan federation.toml --out kits")
    for name in HOSPITALS:
        shutil.copytree(coordinator / "kits" / name, root / name, dirs_exist_ok=True)
        shutil.copy(HERE / name / "site.toml", root / name)  # as its engineer filled it in

    title("Each hospital looks at what would leave. Nothing is sent")
    show_all([root / name for name in HOSPITALS], "site check site.toml", brief=True)

    title("Keys are made at the hospitals, and signed by the coordinator")
    asked = show_all([root / name for name in HOSPITALS], "site request site.toml")
    for name, said in zip(HOSPITALS, asked, strict=True):
        shutil.move(root / name / f"{name}.request.zip", coordinator)
        told = show(coordinator, f"deploy approve kits {name}.request.zip --fingerprint {fingerprint(said)}")
        shutil.copy(coordinator / "kits" / name / f"{name}.answer.zip", root / name / "answer.zip")
    show_all(
        [root / name for name in HOSPITALS], f"site install site.toml answer.zip --fingerprint {fingerprint(told)}"
    )
    show_all([root / name for name in HOSPITALS], "deploy doctor site.toml")

    title("The hospitals take part, and the coordinator runs the plan")
    with started([root / name for name in HOSPITALS], "site start site.toml"):
        show(coordinator, "deploy run federation.toml")
        show(coordinator, "deploy status federation.toml")

    title("What one hospital saw")
    print((root / HOSPITALS[0] / "start.log").read_text("utf-8").rstrip())

    title("The coordinator's record of the run")
    show(coordinator, "show runs/heart")

    title("A hospital predicts with its own model, which never left it")
    model = next((root / HOSPITALS[0] / "private" / "models").glob("*.safetensors"))
    show(root / HOSPITALS[0], f"predict {model.relative_to(root / HOSPITALS[0])} --data new-patients.csv", lines=20)

    title("A fifth hospital comes later: the coordinator sends it what every site was sent, and nothing of theirs")
    show(coordinator, f"deploy share runs/heart --to heart-for-{LATER}")
    shutil.copytree(coordinator / f"heart-for-{LATER}", root / LATER / f"heart-for-{LATER}")
    adapt = f"adapt heart-for-{LATER} --data patients.csv --label-column diagnosis --epochs 5 --to models"
    show(root / LATER, adapt)
    model = next((root / LATER / "models").glob("*.safetensors"))
    show(root / LATER, f"predict {model.relative_to(root / LATER)} --data new-patients.csv", lines=20)
    print(f"\nDone in {time.monotonic() - began:.0f} s. All files are in {_short(root)}; nothing runs any more.")


def title(text: str) -> None:
    """Begin a part."""
    print(f"\n=== {text} ===", flush=True)


def show(place: Path, command: str, lines: int | None = None) -> str:
    """Run a command in a directory, and show it and what it prints, as it comes."""
    print(f"\n{place.name}$ fedtailor {command}", flush=True)
    said: list[str] = []
    words, pipe = _words(command), subprocess.PIPE
    run = subprocess.Popen(words, cwd=place, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        assert run.stdout
        for line in run.stdout:
            said.append(line)
            if lines is None or len(said) <= lines:
                print(line, end="", flush=True)
        run.wait()
    finally:
        _end([run])
    if lines is not None and len(said) > lines:
        print(f"… ({len(said) - lines} more lines)")
    if run.returncode:
        sys.exit(f"It ended with code {run.returncode}.")
    return "".join(said)


def show_all(places: list[Path], command: str, brief: bool = False) -> list[str]:
    """Run a command in several directories at once, and show what each prints. `brief`: of the others only the end."""

    def quietly(place: Path) -> subprocess.CompletedProcess[str]:
        words, pipe = _words(command), subprocess.PIPE
        return subprocess.run(words, cwd=place, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(quietly, places))
    for place, done in zip(places, found, strict=True):
        lines = done.stdout.rstrip().splitlines()
        print(f"\n{place.name}$ fedtailor {command}")
        print(
            "\n".join(["…", lines[-1]] if brief and place != places[0] and not done.returncode else lines), flush=True
        )
        if done.returncode:
            sys.exit(f"It ended with code {done.returncode}.")
    return [done.stdout for done in found]


def fingerprint(said: str) -> str:
    """Find the fingerprint in what a command printed: people tell it by telephone."""
    found = re.search("SHA256:[0-9A-F:]+", said)
    assert found
    return found[0]


@contextmanager
def started(places: list[Path], command: str) -> Iterator[None]:
    """Run a command in several directories, in the background, and end it as Ctrl-C would."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for place in places:
            print(f"\n{place.name}$ fedtailor {command} &", flush=True)
            with (place / "start.log").open("wb") as log:
                running.append(subprocess.Popen(_words(command), cwd=place, stdout=log, stderr=subprocess.STDOUT))
        yield
    finally:
        _end(running)


def _end(running: "list[subprocess.Popen[str]] | list[subprocess.Popen[bytes]]") -> None:
    """End processes as Ctrl-C would, and wait for them."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()


def _words(command: str) -> list[str]:
    return [sys.executable, "-m", "fedtailor", *shlex.split(command)]


def _enter_namespace() -> None:
    """Start again in a network namespace of its own, if that is possible."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    inside = [*unshare, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    possible = all(shutil.which(tool) for tool in ("unshare", "ip"))
    if possible and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", [*inside, sys.executable, *sys.argv])
    print("No network namespace can be made here: while this runs, port 8002 is open on all interfaces.", flush=True)


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped; what was started is ended.")
