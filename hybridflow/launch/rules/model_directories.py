"""Checks that a model can be built from its directory, without reading its weights."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Model
from hybridflow.errors import EngineError
from hybridflow.models.geometry import read_geometry
from hybridflow.models.loading import torch_dtype
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.models.skeleton import causal_lm_skeleton

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_models(models: Mapping[Path, Model]) -> None:
    """Checks each model by its directory.

    Raises `EngineError` for a description from which transformers cannot build a model, and for quantised weights.
    Warns of layers that are in the weights but not in the description. The modules are built without memory, so this
    takes no longer for a large model.
    """
    for directory, model in models.items():
        _check(directory, model)


def _check(directory: Path, model: Model) -> None:
    layers = read_geometry(directory).layers
    method = read_json_object(directory / "config.json").get("quantization_config")
    if method is not None:
        name = method.get("quant_method") if isinstance(method, dict) else None
        raise EngineError(
            f"The weights in {directory} are quantised ({name or 'quantization_config in its config.json'}).",
            remedy="Use the model in float32, bfloat16 or float16; quantised weights cannot be trained or divided.",
        )
    causal_lm_skeleton(directory, dtype=torch_dtype(model.dtype), trust_remote_code=model.trust_remote_code)
    _warn_of_layers(directory, layers)


def _warn_of_layers(directory: Path, layers: int) -> None:
    """Warns of layers that are never read; those after the last may predict further tokens (MTP)."""
    if not any(directory.glob("*.safetensors")):
        return
    numbers = {int(found[1]) for name in saved_shapes(directory) if (found := _LAYER.search(name))}
    if beyond := sorted(number for number in numbers if number >= layers):
        logger.warning(
            "model=%s: the weights have layers %d to %d, and its config.json says num_hidden_layers=%d: they are not"
            " used",
            directory, beyond[0], beyond[-1], layers,
        )  # fmt: skip
