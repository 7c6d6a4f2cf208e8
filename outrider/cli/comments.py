"""What the comments in a class say of its fields."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from functools import cache


@cache
def field_comments(owner: type) -> dict[str, str]:
    """By field, or member of an enumeration, that the class declares itself: the comment behind it, or the lines of
    comment right above it; "" where there is neither."""
    source = inspect.getsource(owner)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {token.start[0]: token.string.removeprefix("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    fields = {
        target.id: statement
        for statement in body.body
        if isinstance(statement, ast.AnnAssign | ast.Assign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }
    code_lines = {line for field in fields.values() for line in range(field.lineno, (field.end_lineno or 0) + 1)}

    def comment(field: ast.AnnAssign | ast.Assign) -> str:
        if behind := by_line.get(field.end_lineno or 0, ""):
            return behind
        above: list[str] = []
        line = field.lineno - 1
        while line in by_line and line not in code_lines:
            above.insert(0, by_line[line])
            line -= 1
        return " ".join(above)

    return {key: comment(field) for key, field in fields.items()}
