"""The arguments of `hybridflow.run` that are objects become settings, which name files in the run's directory."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.api.functions import setting_of
from hybridflow.api.inputs import Inputs
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.other_names import counterpart
from hybridflow.config.paths import PREFIX
from hybridflow.errors import STRICT, ConfigError, DataError, Faults
from hybridflow.launch.compose.overrides import suggestion
from hybridflow.models.loading import quiet_transformers

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from pandas import DataFrame

    Rows = str | Path | Iterable[str | Path] | Iterable[Mapping[str, object]] | Dataset | IterableDataset | DataFrame


class Objects(TypedDict, total=False):
    """The objects of a run. All are optional: settings of the same meaning, or the defaults, apply instead."""

    model: str | Path | PreTrainedModel | None
    """The model of every role that does not name its own: a directory, a name on the Hugging Face Hub, or a model,
    whose weights are copied: the run trains the copy (see `Result.model`)."""

    tokenizer: str | Path | PreTrainedTokenizerBase | None
    """The tokenizer; by default, the one in the model's directory."""

    data: "Rows | None"
    """The rows to train on: paths and names as in `data.train_files`, a list of mappings, a `datasets.Dataset`, or a
    pandas DataFrame."""

    eval_data: "Rows | None"
    """Held-out rows, in the same forms."""

    reward: str | Path | Callable | PreTrainedModel | Sequence[str | Callable] | None
    """A reward function or several: functions with a known signature, or names as in `reward.functions`. Or a reward
    model: a path or a `PreTrainedModel`."""

    roles: Mapping[str, object] | None
    """Further roles by name: a mapping of settings as in `roles.NAME`, or one or several reward functions."""


_STAND_INS: dict[str, dict[str, object]] = {
    "model": {"model.path": f"{PREFIX}calculator"},
    "data": {"data.train_files": [f"{PREFIX}calculator/train"]},
    "eval_data": {"data.eval_files": [f"{PREFIX}calculator/eval"]},
    "reward": {"reward.functions": ["exact_match"]},
}
"""Settings in place of an object that cannot be stored, so that the other problems of a run can be found."""


def object_settings(objects: Objects, inputs: Inputs, faults: Faults = STRICT) -> dict[str, object]:
    """The settings that stand for the objects; the objects themselves are stored among the inputs.

    Adds a `ConfigError` or a `DataError` for each object that cannot be stored. Raises `TypeError` for an argument that
    `Objects` does not have.
    """
    makers = {
        "model": lambda model: _model_settings(model, objects.get("tokenizer"), inputs),
        "tokenizer": lambda tokenizer: {"model.tokenizer_path": _stored(tokenizer, "tokenizer", inputs)},
        "data": lambda data: {"data.train_files": _files(data, "data", inputs)},
        "eval_data": lambda data: {"data.eval_files": _files(data, "eval_data", inputs)},
        "reward": lambda reward: _reward_settings(reward, inputs),
        "roles": lambda roles: {f"roles.{name}": _role(role, name, inputs) for name, role in roles.items()},
    }
    found: dict[str, object] = {}
    for name, given in objects.items():
        if name not in makers:
            instead = counterpart(name) or did_you_mean(name, makers).rstrip() or suggestion(name).rstrip()
            raise TypeError(
                f"unexpected argument '{name}'. {instead} The objects are {', '.join(makers)}; settings are the second"
                " argument, a mapping."
            )
        before = len(faults.found)
        with faults.caught():
            found |= {} if given is None else makers[name](given)
        if len(faults.found) > before:
            found |= _STAND_INS.get(name, {})
    return found


def plain_value(value: object, inputs: Inputs, *, key: str) -> object:
    """A setting's value as YAML has it: paths and enumerations as text, functions and classes as what names them."""
    match value:
        case Mapping():
            return {str(name): plain_value(item, inputs, key=f"{key}.{name}") for name, item in value.items()}
        case list() | tuple():
            return [plain_value(item, inputs, key=key) for item in value]
        case Path():
            return str(value)
        case Enum():
            return value.name
        case numpy.generic():
            return value.item()
        case _ if callable(value):
            return setting_of(value, inputs, key=key)
    return value


def _model_settings(model: object, tokenizer: object, inputs: Inputs) -> dict[str, object]:
    settings: dict[str, object] = {"model.path": _stored(model, "model", inputs)}
    if isinstance(model, PreTrainedModel) and tokenizer is None:
        if not model.name_or_path:
            raise ConfigError(
                "model= is a model that was not loaded from a directory, and there is no tokenizer=.",
                remedy="Give its tokenizer: tokenizer=AutoTokenizer.from_pretrained(...), or a path.",
            )
        settings["model.tokenizer_path"] = model.name_or_path
    return settings


def _stored(given: object, name: str, inputs: Inputs) -> str:
    """A path as text, or the directory in which a model or a tokenizer is stored."""
    if isinstance(given, str | Path):
        return str(given)
    if isinstance(given, PreTrainedModel | PreTrainedTokenizerBase):
        with quiet_transformers():
            return inputs.keep(name, given.save_pretrained)
    kind = "PreTrainedModel" if name == "model" else "PreTrainedTokenizerBase"
    raise ConfigError(
        f"{name}= is of type {type(given).__name__}.",
        remedy=f"Give a path, a name on the Hugging Face Hub, or a {kind} of transformers.",
    )


def _files(given: object, name: str, inputs: Inputs) -> list[str]:
    """The files of rows that are given as paths or stored as objects."""
    if isinstance(given, str | Path):
        return [str(given)]
    for kind in ("DatasetDict", "IterableDatasetDict"):
        if _is(given, "datasets", kind):
            splits = ", ".join(map(str, given)) if isinstance(given, Mapping) else ""
            raise DataError(f"{name}= has several splits ({splits}).", remedy=f"Choose one: {name}=dataset['train'].")
    if _is(given, "datasets", "Dataset") or _is(given, "pandas", "DataFrame"):
        return [inputs.keep("data.parquet", given.to_parquet)]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise DataError(
            f"{name}= is of type {type(given).__name__}.",
            remedy="Give a list of mappings, one per row; a datasets.Dataset; a pandas DataFrame; or paths of files.",
        )
    rows = list(given)
    if rows and all(isinstance(row, str | Path) for row in rows):
        return list(map(str, rows))
    lines = [_line(row, number, name) for number, row in enumerate(rows, start=1)]
    if not lines:
        raise DataError(f"{name}= has no rows.", remedy="Give at least one row, or leave it out.")
    return [inputs.keep("data.jsonl", lambda path: path.write_text("".join(lines), encoding="utf-8"))]


def _is(given: object, module: str, kind: str) -> bool:
    """Whether an object is an instance of `module.kind`, without importing the module."""
    known = vars(sys.modules[module]).get(kind) if module in sys.modules else None
    return known is not None and isinstance(given, known)


def _line(row: object, number: int, name: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(
            f"{name}=: row {number} is of type {type(row).__name__}.",
            remedy="Give each row as a mapping, such as {'prompt': '1+1=', 'answer': '2'}.",
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_json_value) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}=: row {number} cannot be written as JSON: {error}.",
            remedy="Use text, numbers, true and false, lists and mappings of these.",
        ) from error


def _json_value(value: object) -> object:
    if isinstance(value, numpy.generic | numpy.ndarray | torch.Tensor):
        return value.tolist()
    raise TypeError(f"it has a {type(value).__name__}")


def _reward_settings(reward: object, inputs: Inputs) -> dict[str, object]:
    if isinstance(reward, Path | PreTrainedModel):
        return {"reward.model.path": _stored(reward, "model", inputs)}
    return {"reward.functions": _functions(reward, inputs, key="reward")}


def _functions(given: object, inputs: Inputs, *, key: str) -> list[object]:
    several = list(given) if isinstance(given, list | tuple) else [given]
    for each in several:
        if not isinstance(each, str) and not callable(each):
            raise ConfigError(
                f"{key}= has an object of type {type(each).__name__}.",
                remedy="Give functions, or names as in reward.functions.",
            )
    return [plain_value(each, inputs, key=key) for each in several]


def _role(role: object, name: str, inputs: Inputs) -> dict[str, object]:
    """The settings of a role; a model given as a path or an object is its `model.path`."""
    if not isinstance(role, Mapping):
        return {"kind": "reward_function", "functions": _functions(role, inputs, key=f"roles.{name}")}
    settings = dict(role)
    model = settings.get("model")
    if isinstance(model, str | Path | PreTrainedModel):
        settings["model"] = {"path": _stored(model, "model", inputs)}
    return {str(key): plain_value(value, inputs, key=f"roles.{name}.{key}") for key, value in settings.items()}
