"""`hybridflow recipe`: lists the recipes, or writes one to standard output."""

import argparse
import ast
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError

_EXAMPLES = """examples:
  hybridflow recipe
  hybridflow recipe custom_dataflow > custom_dataflow.py
"""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `recipe` to the commands."""
    about = "Recipes are single files to copy and change. Without a name, lists them."
    parser = add(help="list the recipes, or print one", description=about, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument("name", nargs="?", help="the recipe to print")


def recipes() -> dict[str, Path]:
    """The recipe files by name, from the wheel or from a checkout."""
    package = Path(str(files("hybridflow")))
    for folder in (package / "recipes", package.parent / "recipes"):
        if found := sorted(folder.glob("*.py")):
            return {path.stem: path for path in found}
    raise ConfigError(f"There are no recipes in or next to {package}.", remedy="Install hybridflow again.")


def _run(arguments: argparse.Namespace, console: Console) -> None:
    found = recipes()
    if arguments.name is None:
        width = max(map(len, found))
        for name, path in found.items():
            about = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            sys.stdout.write(f"{name:{width}}  {about}\n")
        return
    name = arguments.name.removesuffix(".py")
    if name not in found:
        raise ConfigError(
            f"There is no recipe '{name}'.", remedy=f"{did_you_mean(name, found)}Recipes: {', '.join(found)}."
        )
    sys.stdout.write(found[name].read_text())
