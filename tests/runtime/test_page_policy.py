"""Both pages run their own script alone, and no line of it makes a text into HTML or loads anything."""

import pathlib
import re

import pytest

import ling3
from ling3.runtime.page_policy import content_policy

ROOT = pathlib.Path(ling3.__file__).parent
PAGES = sorted(ROOT.rglob("*.html"))
LOADS = r"""(?:src|href)=["'](?!data:)|@import|url\("""
HANDLERS = r""" on\w+=|style=|javascript:"""
PARSES = r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|parseFromString|srcdoc|document\.write"
RUNS = r"""\beval\(|\bFunction\(|set(?:Timeout|Interval)\(["'`]|\bimport\("""
LEADS = r"""\.(?:href|src|action) *=|setAttribute\("(?:href|src|on)|window\.open|location *="""


def test_every_page_is_looked_at():
    assert [path.relative_to(ROOT).as_posix() for path in PAGES] == ["interpret/look.html", "server/page.html"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_its_policy_allows_its_own_script_and_style_alone(path):
    policy = dict(part.split(" ", 1) for part in content_policy(path.read_text(encoding="utf-8")).split("; "))
    closed = ("default-src", "base-uri", "form-action", "trusted-types")
    assert all(policy.pop(name) == "'none'" for name in closed)
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert sorted(policy) == ["script-src", "style-src"]
    assert all(re.fullmatch(r"'sha256-[\w+/=]+'", allowed) for allowed in policy.values())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_it_has_no_handlers_loads_nothing_and_parses_no_text(path):
    page = path.read_text(encoding="utf-8")
    assert page.index("{{policy}}") < page.index("<title>"), "what stands before a policy is outside of it"
    assert re.findall("|".join((LOADS, HANDLERS, PARSES, RUNS, LEADS)), page) == []
