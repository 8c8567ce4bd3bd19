"""A hook of mkdocs: folds the code of notebook cells that draw, so that a reader meets the figure first."""

import re

CELL, INPUT, OUTPUT = (f'<div class="jp-Cell{part}' for part in (" ", "-inputWrapper", "-outputWrapper"))


def folded(cell: str) -> str:
    """A cell's HTML, with its code in a `details` element if an image is among its outputs."""
    code, mark, output = cell.partition(OUTPUT)
    if "jp-RenderedImage" not in output:
        return cell
    before, start, code = code.partition(INPUT)
    return f"{before}<details><summary>The code of this figure</summary>{start}{code}</details>{mark}{output}"


def on_page_content(content: str, page, config, files) -> str:
    """The page of a notebook with the code of its figures folded."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    return "".join(map(folded, re.split(f"(?={CELL})", content)))
