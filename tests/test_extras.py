"""The command that installs an extra fits how fedtailor itself was installed."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedtailor._common import extras
from fedtailor._common.extras import install_command

LOCAL = Path("/").as_uri()  # of addresses of files


class Installed:
    """A distribution of which pip recorded this source; None: a package index."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.source if self.source is None or isinstance(self.source, str) else json.dumps(self.source)


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (None, "pip install 'fedtailor[tune]'"),
        ("broken {", "pip install 'fedtailor[tune]'"),
        ({"url": f"{LOCAL}gone/for/good", "dir_info": {}}, "pip install 'fedtailor[tune]', or '.[tune]' in a clone"),
        ({"url": f"{LOCAL}a/b.whl", "archive_info": {}}, f"pip install 'fedtailor[tune] @ {LOCAL}a/b.whl'"),
        (
            {"url": "https://x.org/f", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'fedtailor[tune] @ git+https://x.org/f@abc'",
        ),
    ],
)
def test_from_an_index_or_an_address(
    source: Any, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extras, "PACKAGE", tmp_path / "site-packages" / "fedtailor")
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(source))
    assert install_command("tune") == command


def test_from_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    monkeypatch.setattr(extras, "PACKAGE", tmp_path / "site-packages" / "fedtailor")
    recorded = {"url": clone.as_uri(), "dir_info": {}}
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(recorded))
    assert install_command("tune") == f"pip install '{clone}[tune]'"
    monkeypatch.setattr(extras, "PACKAGE", clone / "fedtailor")  # the code itself is there: an editable install
    (clone / "pyproject.toml").touch()
    assert install_command("tune") == f"pip install -e '{clone}[tune]'"
