"""A Sphinx extension that reads docstrings as this project writes them: plain text with names in backticks, indented
code without a mark before it, and the fields of a dataclass described by the comments beside them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Source|Yields):$")
_IN_WORDS = re.compile(r"(`[^`]*`)|([*|\\])|(?<=\w)(_)(?!\w)")


def setup(app: Any) -> dict[str, bool]:
    """Before napoleon, which reads the sections."""
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    app.connect("autodoc-process-signature", signature)
    app.connect("missing-reference", elsewhere)
    app.setup_extension("sphinx.ext.autodoc")
    return {"parallel_read_safe": True}


def signature(_: Any, what: str, __: str, one: Any, ___: Any, signature: str, returns: str) -> tuple[str, str] | None:
    """None for a dataclass that users are given and do not make: its fields are listed below it."""
    if what == "class" and dataclasses.is_dataclass(one) and "Args:" not in (one.__doc__ or ""):
        return "", ""
    return None


def elsewhere(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A name without its module, as code has it, where only one object of that name is documented."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    found = [name for name in domain.objects if name.endswith(f".{node['reftarget']}")]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)


def rewrite(_: Any, __: str, ___: str, one: Any, ____: Any, lines: list[str]) -> None:
    """A docstring as reStructuredText with Google's sections."""
    lines[:] = [*_prose(lines)]
    if isinstance(one, type) and dataclasses.is_dataclass(one):
        known = "\n".join(lines)
        fields = [words for name, words in _fields(one) if not re.search(rf"^ +{name}\b.*:", known, re.M)]
        if fields:
            lines += ["", "Attributes:", *(f"    {field}" for field in fields), ""]


def _prose(lines: list[str]) -> list[str]:
    """Indented code gets its mark, and in prose nothing but backticks has a meaning."""
    found: list[str] = []
    section = ""
    is_code = False
    for at, line in enumerate(lines):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text and indent == 0:
            section = text[:-1] if _SECTION.match(text) else ""
            is_code = False
        elif text and indent >= 4 and not section and not is_code and not lines[at - 1].strip():
            found += ["::", ""]
            is_code = True
        is_example = section in ("Example", "Examples")
        found.append(line if is_code or is_example or not text else _escaped(line))
    return found


def _escaped(line: str) -> str:
    return _IN_WORDS.sub(lambda match: match[1] or f"\\{match[2] or match[3]}", line)


def _fields(one: type) -> list[tuple[str, str]]:
    """The fields of a dataclass: name, and entry in a section `Attributes`, of the comment beside it."""
    source = textwrap.dedent(inspect.getsource(one))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return [
        (
            node.target.id,
            f"{node.target.id} ({ast.unparse(node.annotation)}): {_escaped(comments.get(node.lineno, ''))}".rstrip(),
        )
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    ]
