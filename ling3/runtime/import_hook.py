"""The import hook: every function and dataclass of a package is decorated with `checks.typed`.

jaxtyping's hook of this kind opens a scope for the names of axes in every call, which takes 15 µs; few functions name
axes, and `checks.typed` sees which.
"""

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

from ling3.runtime import checks

IMPORT = ast.parse(f"from {checks.__name__} import {checks.typed.__name__} as _typed_").body[0]
UNCHECKED = frozenset(f"ling3.engine.{name}" for name in ("actor", "prefixes", "radix", "request", "scheduler"))
"""Modules without arrays whose functions run for every token or page of every request: checks would take longer."""
SUFFIX = ".typed1.pyc"
"""The end of the files of bytecode, which lie beside those of the same modules without checks."""


class _Decorating(ast.NodeTransformer):
    """Decorates a function first, as other decorators take annotations away, and a class last, when it has its fields.

    What is decorated with `no_type_check` stays as it is.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._decorated(node, len(node.decorator_list))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._decorated(node, 0)

    def _decorated(self, node: ast.FunctionDef | ast.ClassDef, place: int) -> ast.AST:
        if any(ast.unparse(decorator).endswith("no_type_check") for decorator in node.decorator_list):
            return node
        node.decorator_list.insert(place, ast.copy_location(ast.Name("_typed_", ast.Load()), node))
        return self.generic_visit(node)


class _Loader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        tree = _Decorating().visit(ast.parse(data, path))
        place = next(i for i, node in enumerate([*tree.body, None]) if not _is_prologue(node))
        tree.body.insert(place, IMPORT)
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)
        return code

    def get_data(self, path: str) -> bytes:
        return super().get_data(path.replace(".pyc", SUFFIX))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(path.replace(".pyc", SUFFIX), data, _mode=_mode)


def _is_prologue(node: ast.stmt | None) -> bool:
    """True for a docstring and for imports from `__future__`, which only these may precede."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


class CheckedFinder:
    """Finds a package and its modules, whose functions and dataclasses then check their types."""

    def __init__(self, package: str):
        self._package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec with the loader that decorates; None for what is not to be checked."""
        if fullname.partition(".")[0] != self._package or fullname in UNCHECKED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install(package: str) -> CheckedFinder:
    """Puts a finder for the package before all others, and returns it."""
    finder = CheckedFinder(package)
    sys.meta_path.insert(0, finder)
    return finder
