"""Makes executed notebooks usable away from the repository: a badge that opens one in Colab, and a cell that installs.

    python docs/install_cell.py https://github.com/OWNER/ling3 docs/notebooks/*.ipynb

Colab opens files of a GitHub branch: that of `mkdocs gh-deploy`, where the notebooks have their outputs.
"""

import pathlib
import sys

import nbformat

BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"
LINK = "https://colab.research.google.com/github/{repository}/blob/gh-pages/notebooks/{file}"
INSTALL = """\
# Where ling3 is not installed: the whole repository, since some notebooks read its results.
import importlib.util

if importlib.util.find_spec("ling3") is None:
    !git clone --quiet --depth 1 {address} ling3
    %pip install --quiet "./ling3[notebooks]"
    %cd ling3/notebooks"""


def install(path: pathlib.Path, address: str) -> None:
    """Adds the badge to the first cell of a notebook, and the cell below it. Raises ValueError if not on GitHub."""
    host, _, repository = address.removeprefix("https://").removesuffix(".git").partition("/")
    if host != "github.com" or repository.count("/") != 1:
        raise ValueError(f"the repository is {address!r}, expected https://github.com/OWNER/NAME")
    notebook = nbformat.read(path, as_version=4)
    badge = BADGE.format(link=LINK.format(repository=repository, file=path.name))
    title, *rest = notebook.cells
    title.source += f"\n\n{badge}"
    notebook.cells = [title, nbformat.v4.new_code_cell(INSTALL.format(address=address)), *rest]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        install(pathlib.Path(name), sys.argv[1])
