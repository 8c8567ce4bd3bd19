"""An environment of its own for a wheel, without a network: only what the wheel says that it needs."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import venv

from packaging.requirements import Requirement


def needed(name, extras=(), without=()):
    """The names of the distributions that `name` with `extras` requires, and those that these require."""
    found, waiting = set(), [(name, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.name in without or (
                requirement.marker and not requirement.marker.evaluate({"extra": extra})
            ):
                continue
            waiting += [(requirement.name, each) for each in ("", *requirement.extras)]
    return {name for name, _ in found}


def environment(place, wheel, names):
    """Makes an environment at `place` with the wheel and links to the installed distributions of these names.

    Returns its directory of packages.
    """
    venv.create(place, symlinks=True)
    [packages] = place.glob("lib/python*/site-packages")
    for name in names:
        files = importlib.metadata.files(name)
        tops = {file.parts[0] for file in files} - {"..", "__pycache__"}
        for top in tops:
            link = packages / top
            if not link.is_symlink():
                link.symlink_to(pathlib.Path(files[0].locate()).parents[len(files[0].parts) - 1] / top)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "-q"]
    quietly = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, *quietly, str(wheel)], env=variables(place), check=True)
    return packages


def variables(place, **more):
    """The variables of a new user's shell, at home in `place`, with these besides."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LING3_", "PYTHON", "XDG_"))}
    return {**kept, "HOME": str(place), **more}
