"""The comment behind a field is its documentation, in the reference as in the code."""

import io
import tokenize
from typing import Any

from griffe import Attribute, Docstring, Extension


class FieldComments(Extension):
    """Give a field without a docstring the comment that stands behind it."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno and attr.endlineno and not attr.is_alias:
            lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]  # type: ignore[index]
            tokens = tokenize.generate_tokens(io.StringIO("\n".join(line.strip() for line in lines)).readline)
            comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
            if comments:
                attr.docstring = Docstring(" ".join(comments), parent=attr)
