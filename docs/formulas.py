"""A hook of mkdocs: typesets the site's formulas with KaTeX while it is built, so that pages need no script for them.

`docs/katex` holds katex.min.js, katex.min.css, the woff2 fonts and the licence of KaTeX 0.19.1, as npm publishes them.
"""

import functools
import html
import pathlib
import re

from mkdocs.exceptions import PluginError
from py_mini_racer import JSEvalException, MiniRacer

# What is left alone comes first: whole elements with code (the copy button's too), and the inside of tags.
VERBATIM = r'<div [^>]*class="clipboard-copy-txt".*?</div>|<(?P<code>pre|code|script|style)\b.*?</(?P=code)>|<[^>]*>'
NOTEBOOK = re.compile(rf"{VERBATIM}|\$\$(?P<display>[^$<]+)\$\$|\$(?P<inline>[^$<]+)\$", re.DOTALL)
MARKDOWN = re.compile(rf"{VERBATIM}|\\\[(?P<display>[^<]+?)\\\]|\\\((?P<inline>[^<]+?)\\\)", re.DOTALL)  # by arithmatex
MATHJAX = re.compile(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", re.DOTALL)  # by nbconvert

KATEX = (pathlib.Path(__file__).parent / "katex/katex.min.js").read_text(encoding="utf-8")


def typeset(engine: MiniRacer, match: re.Match[str]) -> str:
    """HTML and MathML of a formula, or what was matched if it is none; JSEvalException where KaTeX refuses it."""
    formula = match["display"] or match["inline"]
    if formula is None:
        return match[0]
    options = {"displayMode": match["display"] is not None, "strict": "error"}
    rendered = engine.call("katex.renderToString", html.unescape(formula), options)
    return f"<span data-search-exclude>{rendered}</span>"  # the search index would have each symbol thrice


def on_page_content(content: str, page, config, files) -> str:
    """The page with its formulas typeset and without nbconvert's call for MathJax; PluginError names a bad formula."""
    formulas = NOTEBOOK if page.file.src_uri.endswith(".ipynb") else MARKDOWN
    try:
        with MiniRacer() as engine:  # closed at once: one that is left to the end of the process may hang there
            engine.eval(KATEX)
            return formulas.sub(functools.partial(typeset, engine), MATHJAX.sub("", content))
    except JSEvalException as error:
        reason = str(error).splitlines()[0]  # the rest quotes katex.min.js
        raise PluginError(f"{page.file.src_uri}: {reason}") from error
