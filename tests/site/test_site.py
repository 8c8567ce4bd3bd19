"""The built site: formulas are typeset, links lead somewhere, and a browser has nothing to complain about."""

import functools
import html.parser
import http.server
import importlib.util
import pathlib
import re
import subprocess
import threading
import types
import urllib.parse

import markdown
import nbformat
import pytest
from browser import BROWSER
from IPython.core.inputtransformer2 import TransformerManager
from mkdocs.exceptions import PluginError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SITE = ROOT / "build" / "site"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.py"))
VOID = ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
CODE = ("pre", "code", "script", "style")


def script(name: str) -> types.ModuleType:
    """A file of `docs/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


formulas, install_cell = script("formulas"), script("install_cell")


class Page(html.parser.HTMLParser):
    """A page's ids, links, what it loads, the number of its typeset formulas, and its text outside these and code."""

    def __init__(self, source: str):
        super().__init__()
        self.ids, self.links, self.loads, self.formulas, self.text = set(), [], [], 0, []
        self.open = []  # of each element that is open: its tag, and whether its text is code or a formula
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        typeset = attrs.get("class") == "katex"
        self.formulas += typeset
        self.ids |= {attrs[name] for name in ("id", "name") if attrs.get(name)}
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"])
        self.loads += [attrs[name] for name in ("src", "href") if name in attrs and tag != "a"]
        if tag not in VOID:
            verbatim = typeset or tag in CODE or attrs.get("class") == "clipboard-copy-txt"  # of the copy button
            self.open.append((tag, verbatim or self.in_verbatim()))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:  # svg paths and list items may be left open
            pass

    def handle_data(self, data):
        if not self.in_verbatim():
            self.text.append(data)

    def in_verbatim(self) -> bool:
        return bool(self.open) and self.open[-1][1]


@functools.cache
def read(page: str) -> Page:
    return Page((SITE / page).read_text(encoding="utf-8"))


def target(page: str, link: str) -> tuple[pathlib.Path, str]:
    """The file of the site that a page's link leads to, and the id in it."""
    parts = urllib.parse.urlsplit(link)
    path = urllib.parse.unquote(parts.path)
    base = SITE if path.startswith("/") else (SITE / page).parent
    file = (base / path.lstrip("/")).resolve() if path else SITE / page
    return (file / "index.html" if file.is_dir() else file), urllib.parse.unquote(parts.fragment)


def test_the_site_is_built():
    assert PAGES, "build/site is empty: run `make docs`"


@pytest.mark.parametrize("page", PAGES)
def test_no_formula_is_left_as_text(page):
    assert not re.findall(r"\$\$|\\[(\[]|\\[a-z]{2,}|\$[^\s$][^$]*\$", "".join(read(page).text))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebooks_formulas_are_typeset(name):
    cells = nbformat.read(SITE / "notebooks" / name / f"{name}.ipynb", as_version=4).cells
    prose = "".join(re.sub(r"`[^`]*`", "", cell.source) for cell in cells if cell.cell_type == "markdown")
    assert read(f"notebooks/{name}/index.html").formulas == len(re.findall(r"\$\$[^$]+\$\$|\$[^$]+\$", prose))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebooks_code_fits_its_column_and_that_of_figures_is_folded(name):
    cells = nbformat.read(SITE / "notebooks" / name / f"{name}.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not [line for cell in code for line in cell.source.splitlines() if len(line) > 88]
    drawn = [cell for cell in code if any("image/png" in output.get("data", {}) for output in cell.outputs)]
    page = (SITE / "notebooks" / name / "index.html").read_text(encoding="utf-8")
    assert page.count("<summary>The code of this figure</summary>") == len(drawn)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in read(page).links:
        if not urllib.parse.urlsplit(link).scheme:
            file, fragment = target(page, link)
            assert file.is_file(), link
            assert not fragment or fragment in read(str(file.relative_to(SITE))).ids, f"{link}: no such anchor"


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_loaded_from_elsewhere(page):
    for link in read(page).loads:
        if not link.startswith("data:"):
            assert link and not urllib.parse.urlsplit(link).netloc and target(page, link)[0].is_file(), link


def test_formulas_of_markdown_and_docstrings_are_typeset():
    given = "The state $S$ costs \\$5 or `$S$`:\n\n$$S \\leftarrow e^{g} S,\\ g < 0$$\n"
    extensions = {"pymdownx.arithmatex": {"generic": True}}
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="a.md"))
    content = markdown.markdown(given, extensions=list(extensions), extension_configs=extensions)
    made = Page(formulas.on_page_content(content, page, None, None))
    assert made.formulas == 2 and "".join(made.text).split() == ["The", "state", "costs", "$5", "or", ":"]


def test_a_bad_formula_is_refused_by_page_and_name():
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="notebooks/a.ipynb"))
    with pytest.raises(PluginError, match=r"^notebooks/a\.ipynb: .*Undefined control sequence: \\foo"):
        formulas.on_page_content("<p>$\\foo$</p>", page, None, None)


@pytest.fixture(scope="session")
def server():
    """The site on a port of this machine: its address, and a list of the requests, each a path and a status."""
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, code="-", size="-"):
            requests.append((self.path, int(code)))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=SITE)) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/", requests
        httpd.shutdown()


@pytest.mark.skipif(BROWSER is None, reason="found no browser: set $CHROME or install chromium")
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_shows_it_without_complaint(page, server, tmp_path):
    address, requests = server
    requests.clear()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--dump-dom", address + page]
    # Into files, since a process that Chromium leaves behind would keep a pipe open.
    dom, log = tmp_path / "dom.html", tmp_path / "log.txt"
    with dom.open("w") as out, log.open("w") as err:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=120, check=True)
    assert Page(dom.read_text(encoding="utf-8")).formulas == read(page).formulas
    assert not re.findall(r".*CONSOLE.*", log.read_text(encoding="utf-8", errors="replace"))
    assert requests and not [path for path, status in requests if status >= 400]
    assert not read(page).formulas or any("KaTeX_Main-Regular.woff2" in path for path, _ in requests)


def test_a_notebook_away_from_the_repository_installs_it(tmp_path):
    path = tmp_path / "01_the_map.ipynb"
    path.write_bytes((ROOT / "docs" / "notebooks" / path.name).read_bytes())
    before = nbformat.read(path, as_version=4)
    install_cell.install(path, "https://github.com/someone/ling3")
    title, cell, *rest = nbformat.read(path, as_version=4).cells
    assert title.source.startswith(before.cells[0].source) and rest == before.cells[1:]
    assert (
        "(https://colab.research.google.com/github/someone/ling3/blob/gh-pages/notebooks/01_the_map.ipynb)"
        in title.source
    )
    code = TransformerManager().transform_cell(cell.source)
    compile(code, "cell", "exec")
    assert "git clone --quiet --depth 1 https://github.com/someone/ling3 ling3" in code
    with pytest.raises(ValueError, match=r"expected https://github\.com/OWNER/NAME"):
        install_cell.install(path, "ling3")
