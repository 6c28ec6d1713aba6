"""Sizes of models by name, from a file, or from a few numbers, without a checkpoint."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.nearest import did_you_mean, did_you_mean_any
from hybridflow.config.paths import user_path
from hybridflow.errors import ConfigError
from hybridflow.models.geometry import ModelGeometry, geometry_of, parameter_count, read_geometry

_KNOWN = Path(__file__).resolve().parents[1] / "assets" / "models.yaml"
_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[bm])", re.IGNORECASE)
_FEWEST, _LARGE, _MOST = 1e6, 1e9, 1e13
_MOST_HEADS = 1 << 14
_FORMS = (
    "Give a known name (Qwen3-32B), a directory with a config.json or this file, sizes ('hidden=4096 layers=32'), or a"
    " parameter count (13B)."
)

_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_intermediate": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
}
"""Names of sizes on a command line, and their keys in config.json."""

_NEEDED = ("hidden", "layers")


@dataclass(frozen=True)
class FoundModel:
    """A model and its sizes."""

    name: str
    geometry: ModelGeometry
    assumed: str = ""
    """`heads=32 vocab=32000`: sizes that nobody gave; empty if all are known."""


def find_model(text: str) -> FoundModel:
    """The model that a user means.

    In this order: a directory or file of a `config.json`, sizes (`hidden=4096 layers=32`), a parameter count (`13B`),
    a known name with or without its organization, in any case.
    """
    text = text.strip()
    if not text:
        raise ConfigError("The name of the model is empty.", remedy=_FORMS)
    if "=" in text:
        return _by_sizes(text)
    path = user_path(text)
    if path.is_dir() or path.suffix == ".json" or text.startswith((".", "/", "~")):
        return FoundModel(text, read_geometry(path))
    if count := _COUNT.fullmatch(text):
        return _by_count(text, float(count["number"]) * (1e9 if count["unit"].lower() == "b" else 1e6))
    known = _names()
    if text.lower() not in known:
        raise ConfigError(
            f"'{text}' is not a known model.",
            remedy=f"{did_you_mean_any(text.lower().rpartition('/')[2], [name for name in known if '/' not in name])}"
            f"{_FORMS}",
        )
    name = known[text.lower()]
    return FoundModel(name, geometry_of(dict(known_models()[name]), name))


@cache
def known_models() -> Mapping[str, dict]:
    """The configurations of `assets/models.yaml` by name."""
    return yaml.safe_load(_KNOWN.read_text(encoding="utf-8"))


@cache
def _names() -> Mapping[str, str]:
    """In lower case, each name with and without its organization, and the name in the file."""
    found = {}
    for name, config in known_models().items():
        for other in (name, *config.get("also", ())):
            found |= {other.lower(): name, other.lower().rpartition("/")[2]: name}
    return found


def _by_sizes(text: str) -> FoundModel:
    """A model from sizes such as `hidden=4096 layers=32 kv_heads=8`, with the proportions of Llama for the rest."""
    given: dict[str, Any] = {}
    for word in re.split(r"[\s,]+", text):
        name, _, value = word.partition("=")
        if name not in _KEYS:
            raise ConfigError(
                f"'{word}' is not a size of a model.", remedy=f"{did_you_mean(name, _KEYS)}Sizes: {', '.join(_KEYS)}."
            )
        is_truth, value = name == "tied", value.lower()
        if not (value in ("true", "false") if is_truth else re.fullmatch(r"\d{1,18}", value)):
            expected = "true or false" if is_truth else "a whole number"
            raise ConfigError(f"{word} is not {expected}.", remedy=f"Write it as {name}={'true' if is_truth else 32}.")
        given[name] = value == "true" if is_truth else int(value)
    if missing := [name for name in _NEEDED if name not in given]:
        raise ConfigError(f"'{text}' does not give {' and '.join(missing)}.", remedy="Add them: hidden=4096 layers=32.")
    hidden = given["hidden"]
    heads = given.get("heads") or max(1, hidden // (given.get("head_dim") or (128 if hidden >= 2048 else 64)))
    if not ("heads" in given or "head_dim" in given):
        heads = next(count for count in range(min(heads, _MOST_HEADS), 0, -1) if hidden % count == 0)
    rest = {"heads": heads, "kv_heads": heads, "intermediate": _inner_size(hidden), "vocab": 32000, "tied": False}
    if given.get("experts"):
        rest |= {"experts_per_token": 1, "expert_intermediate": given.get("intermediate", rest["intermediate"])}
    assumed = {name: size for name, size in rest.items() if name not in given}
    return FoundModel(text, _geometry(given | assumed, text), _shown(assumed))


def _by_count(text: str, parameters: float) -> FoundModel:
    """A dense model with about this number of parameters, in the usual proportions.

    The hidden size is about 128 times the number of layers, as in Llama, or 64 times below 1B.
    """
    if not _FEWEST <= parameters <= _MOST:
        raise ConfigError(f"'{text}' is not a size from 1M to 10000B.", remedy="Write 13B for 13 billion parameters.")
    choices = _standard_sizes(parameters)
    geometries = [_geometry(sizes, text) for sizes in choices]

    usual = 128 if parameters >= _LARGE else 64

    def distance(geometry: ModelGeometry) -> float:
        shape = math.log(geometry.hidden / geometry.layers / usual)
        return abs(parameter_count(geometry) / parameters - 1) + 0.2 * abs(shape)

    best = min(range(len(choices)), key=lambda index: distance(geometries[index]))
    return FoundModel(text, geometries[best], _shown(choices[best]))


def _standard_sizes(parameters: float) -> list[dict[str, Any]]:
    """Sizes around a number of parameters. From 1B on, heads divide by 4 or 8, and layers by 4, as layouts need."""
    is_large = parameters >= _LARGE
    head, multiple = (128, 1024 if parameters >= 3e9 else 512) if is_large else (64, 128)
    found = []
    for hidden in range(multiple, 32 * 1024 + 1, multiple):
        heads, inner = hidden // head, _inner_size(hidden)
        kv_heads = 8 if parameters >= 20e9 and heads % 8 == 0 else heads
        layer = hidden * (2 * hidden + 2 * kv_heads * head + 3 * inner)
        step = 4 if is_large else 2
        layers = round((parameters - 32000 * hidden * (2 if is_large else 1)) / layer / step) * step
        if 1 <= layers <= 512:
            sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "intermediate": inner}
            found.append(sizes | {"vocab": 32000, "tied": not is_large})
    return found


def _inner_size(hidden: int) -> int:
    """The inner size of Llama's MLP: 8/3 of the hidden size, rounded up to a multiple of 256."""
    return math.ceil(8 * hidden / 3 / 256) * 256


def _geometry(sizes: Mapping[str, Any], name: str) -> ModelGeometry:
    return geometry_of({"model_type": "llama"} | {_KEYS[size]: value for size, value in sizes.items()}, f"'{name}'")


def _shown(sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={str(value).lower()}" for name, value in sizes.items())
