"""A hook of mkdocs: makes the map of the files from the first sentences of the modules' docstrings."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parent.parent / "ling3"
MARK = "<!-- by docs/map_of_files.py -->"


def summary(path: pathlib.Path) -> str:
    """The first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def table(folder: pathlib.Path) -> list[str]:
    """The rows of a folder's modules."""
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    return ["| file | |", "|---|---|", *(f"| `{path.name}` | {summary(path)} |" for path in files)] if files else []


def the_map(package: pathlib.Path = PACKAGE) -> str:
    """A section for each folder with modules, with what the folder is for and a row for each of its modules."""
    folders = [package, *sorted(path.parent for path in package.rglob("*/__init__.py"))]
    sections = []
    for folder in folders:
        name = folder.relative_to(package.parent).as_posix()
        sections += [f"## {name}/", "", summary(folder / "__init__.py"), "", *table(folder), ""]
    return "\n".join(sections)


def on_page_markdown(markdown: str, page, config, files) -> str:
    """The page with the map in the place of its mark."""
    return markdown.replace(MARK, the_map()) if MARK in markdown else markdown
