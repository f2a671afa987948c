"""The documentation runs: every Python block of every page, and every command is one that there is.

The blocks of a page run in their order, in one namespace and an empty directory. In the Markdown, `<!-- setup … -->`
holds Python that runs at its place and is not shown, and `<!-- not run: reason -->` before a block leaves it out.
"""

import re
from pathlib import Path
from traceback import format_exc
from typing import Any

import pytest

from fedtailor.cli import COMMANDS, GROUPS, _built
from tests.cli.calling import Call, call, done
from tests.doc_pages import PIECE, ROOT, commands, pieces

__all__ = ["call"]

PAGES = sorted(
    path.relative_to(ROOT) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/methods/*.md")]
)
QUICK = ("data", "methods", "models", "presets", "settings")  # commands that are also run


def of_pages(language: str) -> list[Path]:
    return [path for path in PAGES if any(p.language == language for p in pieces((ROOT / path).read_text("utf-8")))]


@pytest.mark.slow
@pytest.mark.parametrize("page", of_pages("python"), ids=str)
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)
    names: dict[str, Any] = {"__name__": "__docs__"}
    for piece in pieces((ROOT / page).read_text("utf-8")):
        if piece.language == "python":
            try:
                exec(compile("\n" * (piece.line - 1) + piece.code, str(page), "exec"), names)
            except Exception:
                pytest.fail(f"{page}, the block in line {piece.line}:\n{format_exc()}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_are_understood(page: Path) -> None:
    for line, (name, *words) in commands((ROOT / page).read_text("utf-8")):
        table = COMMANDS
        if name in GROUPS and words:
            (_, table), (name, *words) = GROUPS[name], words
        assert name in table, f"{page}, line {line}: there is no command {name}"
        try:
            _built(name, table[name][0]).make_context(name, words)
        except Exception as error:
            pytest.fail(f"{page}, line {line}: fedtailor {name}: {error}")


def test_quick_commands_run(call: Call) -> None:
    found = {tuple(words) for page in PAGES for _, words in commands((ROOT / page).read_text("utf-8"))}
    quick = sorted(words for words in found if words[0] in QUICK)
    assert {words[0] for words in quick} == {"data", "methods", "models", "presets", "settings"}
    for words in quick:
        own = any(word.endswith(".csv") or word.startswith("mine:") for word in words)
        if not own and not {"digit-4", "--fetch"} & {*words}:  # of the reader's own, or to be got first
            assert done(call(*words))


# --- the reader of pages itself ---

PAGE = """
Text. <!-- setup
x = 1
-->

```python
y = x
```

<!-- not run: it needs luck -->
```python
1 / 0
```

```
fedtailor run ditto --set "lam=0.5 / t"   # a comment
make run
```

```toml
fedtailor = 1
```
"""


def test_blocks_are_found_in_their_order_with_their_lines() -> None:
    found = list(pieces(PAGE))
    assert [piece.code.splitlines()[0] for piece in found if piece.language == "python"] == ["x = 1", "y = x"]
    assert [PAGE.splitlines()[piece.line - 1] for piece in found] == [piece.code.splitlines()[0] for piece in found]
    assert list(commands(PAGE)) == [(16, ["run", "ditto", "--set", "lam=0.5 / t"])]


def test_every_block_of_the_pages_is_found() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        fences = len(re.findall(r"^```", text, re.MULTILINE))
        assert fences == 2 * len([found for found in PIECE.finditer(text) if found["block"] is not None]), page


@pytest.mark.parametrize("words", [["run", "ditto", "--romds", "3"], ["compare", "ditto", "--tune", "many"]])
def test_a_wrong_command_is_seen(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such option|a valid integer"):
        _built(words[0], COMMANDS[words[0]][0]).make_context(words[0], words[1:])
