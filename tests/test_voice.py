"""What a machine can check of the prose in docstrings and comments: plain sentences, and fewer private words."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "ling3").rglob("*.py"))
RIDDLES = ("Those of ", "That of ", "What ", "Which ")
"""Beginnings that make a reader guess the noun."""
PRIVATE = {"own": 184, "settle": 0, "whole": 119, "everywhere": 1, "company": 3, "nobody": 7, "goes with": 1, "told": 2}
PRIVATE |= {"asked for": 21, "is none": 28, "stands for": 31}
"""Words for which the field has better ones, and how often the package may have each: the numbers only shrink."""


def docstrings(path):
    """The name and the docstring of each public class, method and function."""

    def within(node, around):
        for child in getattr(node, "body", []):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name[0] != "_":
                if text := ast.get_docstring(child):
                    yield f"{around}{child.name}", text
                if isinstance(child, ast.ClassDef):
                    yield from within(child, f"{around}{child.name}.")

    return within(ast.parse(path.read_text(encoding="utf-8")), "")


def prose(path):
    """The docstrings and comments of a file."""
    source = path.read_text(encoding="utf-8")
    nodes = (each.value for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Expr))
    texts = [node.value for node in nodes if _is_text(node)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*texts, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_public_docstrings_are_sentences(path):
    for name, text in docstrings(path):
        assert not text.startswith(RIDDLES), f"{name}: {text.splitlines()[0]}"
        assert len(text.split()) >= 6, f"{name}: {text}"


def test_private_words_become_fewer():
    text = " ".join(" ".join(map(prose, FILES)).lower().split())
    found = {word: len(re.findall(rf"\b{word}\b", text)) for word in PRIVATE}
    assert all(found[word] <= most for word, most in PRIVATE.items()), found
