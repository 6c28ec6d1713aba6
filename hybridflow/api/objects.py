"""The arguments of `hybridflow.run` that are objects become settings, which name files in the run's directory."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.api.functions import setting_of
from hybridflow.api.inputs import Inputs
from hybridflow.config import fields
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.other_names import counterpart
from hybridflow.config.paths import PREFIX, user_path
from hybridflow.errors import STRICT, ConfigError, DataError, HybridflowError, Problems
from hybridflow.launch.compose.overrides import suggestion
from hybridflow.launch.compose.presets import GROUPS
from hybridflow.models.loading import is_hub_name, one_line, quiet_transformers

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

    reward: str | Path | Callable | PreTrainedModel | Sequence[str | Path | Callable | PreTrainedModel] | None
    """A reward function or several: functions with a known signature, or names as in `reward.functions`. Or a reward
    model, also together with functions: a path, a name on the Hugging Face Hub, or a `PreTrainedModel`."""

    roles: Mapping[str, object] | None
    """Further roles by name: a mapping of settings as in `roles.NAME`, one or several reward functions, or a reward
    model."""


_STAND_INS: dict[str, dict[str, object]] = {
    "model": {"model.path": f"{PREFIX}calculator"},
    "data": {"data.train_files": [f"{PREFIX}calculator/train"]},
    "eval_data": {"data.eval_files": [f"{PREFIX}calculator/eval"]},
    "reward": {"reward.functions": ["exact_match"]},
}
"""Settings in place of an object that cannot be stored, so that the other problems of a run can be found."""


def object_settings(
    objects: Objects, inputs: Inputs, problems: Problems = STRICT, *, written: Collection[str] = ()
) -> dict[str, object]:
    """The settings that stand for the objects; the objects themselves are stored among the inputs.

    Adds a `ConfigError` or a `DataError` for each object that cannot be stored, that `Objects` does not have, or that
    stands for one of the settings `written` by the user.
    """
    tokenizer = objects.get("tokenizer")
    makers = {
        "model": lambda model: _under("model", _model(model, inputs, [tokenizer, _origin(model)], argument="model")),
        "tokenizer": lambda tokenizer: {"model.tokenizer_path": _stored(tokenizer, "tokenizer", inputs)},
        "data": lambda data: {"data.train_files": _files(data, "data", inputs)},
        "eval_data": lambda data: {"data.eval_files": _files(data, "eval_data", inputs)},
        "reward": lambda reward: _reward_settings(reward, tokenizer, inputs),
        "roles": lambda roles: _roles(roles, tokenizer, inputs),
    }
    found: dict[str, object] = {}
    for name, given in objects.items():
        if name not in makers:
            problems.add(_unknown(name, makers))
        elif given is not None:
            before, made = len(problems.found), {}
            with problems.caught(), _in_words(name):
                made = makers[name](given)
            problems.add(*_conflicts(name, made, written))
            found |= made if len(problems.found) == before else _STAND_INS.get(name, {})
    return found


def _unknown(name: str, known: Collection[str]) -> ConfigError:
    if fields.find(name) is not None or name in GROUPS:
        remedy = f"{name} is a setting: give it in the second argument, a mapping, as {{'{name}': ...}}."
        return ConfigError(f"There is no argument {name}=.", remedy=remedy)
    instead = counterpart(name) or did_you_mean(name, known).rstrip() or suggestion(name).rstrip()
    return ConfigError(
        f"There is no argument {name}=.",
        remedy=f"{instead} The objects are {', '.join(known)}; settings are the second argument, a mapping.".lstrip(),
    )


def _conflicts(name: str, made: Collection[str], written: Collection[str]) -> Iterator[ConfigError]:
    """An error for each setting of the user that an argument stands for as well."""
    for key in made:
        same = next((other for other in written if f"{other}.".startswith(f"{key}.")), None)
        if same is not None and (name, key) != ("model", "model.tokenizer_path"):
            yield ConfigError(
                f"{name}= and the setting {same} are both given, and stand for the same.",
                remedy=f"Leave out {name}= or {same}.",
                key=same,
            )


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """An argument that a library cannot store, for whatever reason, is one `HybridflowError`."""
    try:
        yield
    except HybridflowError:
        raise
    except Exception as error:  # an object can be wrong in as many ways as there are libraries
        kind = DataError if name in ("data", "eval_data") else ConfigError
        raise kind(
            f"{name}= cannot be stored in the run's directory: {one_line(error)}.",
            remedy="Correct it, or write it to a file yourself and give the path.",
        ) from error


def plain_value(value: object, inputs: Inputs, *, key: str) -> object:
    """A setting's value as YAML has it: paths and enumerations as text, functions and classes as what names them.

    Raises `ConfigError` for an object that belongs in an argument, or has no such form.
    """
    _check_belongs(value, key)
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
        case None | bool() | int() | float() | str():
            return value
        case _ if callable(value):
            return setting_of(value, inputs, key=key)
    hint = fields.find(key)
    general = "Settings are texts, numbers, lists, mappings and functions."
    raise _no_setting(value, key, general if hint is None else f"{key} takes {fields.type_name(hint)}.")


def _check_belongs(value: object, key: str) -> None:
    """Raises `ConfigError` for an object among the settings that belongs in an argument."""
    if (argument := _argument_of(value, key)) is not None:
        where = "of run, plan or assemble" if argument == "callbacks" else "(in an Experiment, among its objects)"
        raise _no_setting(value, key, f"Give it as the argument {argument}= {where}.")
    if isinstance(value, PreTrainedModel):
        others = "For another role, save it with save_pretrained, and give the path."
        raise _no_setting(value, key, f"Give a reference as roles={{'reference': MODEL}}. {others}")


def _no_setting(value: object, key: str, remedy: str) -> ConfigError:
    return ConfigError(f"The setting {key} has a value of type {type(value).__name__}.", remedy=remedy, key=key)


def _argument_of(value: object, key: str) -> str | None:
    """The argument for an object that stands among the settings; None for the value of a setting."""
    section = key.partition(".")[0]
    if isinstance(value, PreTrainedTokenizerBase):
        return "tokenizer"
    if isinstance(value, PreTrainedModel) and section in ("model", "reward", "roles"):
        return section
    if key in (*Objects.__annotations__, "callbacks") and not isinstance(value, Mapping):
        return key
    if key.startswith("roles.") and key.count(".") == 1 and not isinstance(value, Mapping):
        return "roles"
    if key in ("data.train_files", "data.eval_files") and _are_rows(value):
        return "eval_data" if "eval" in key else "data"
    return None


def _are_rows(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(row, Mapping) for row in value)
    return isinstance(value, Iterable) and not isinstance(value, str | Path | Mapping)


def _under(section: str, settings: Mapping[str, object]) -> dict[str, object]:
    return {f"{section}.{name}": value for name, value in settings.items()}


def _origin(model: object) -> str | None:
    """Where a model in memory was loaded from, if it was; its tokenizer is there."""
    return (model.name_or_path or None) if isinstance(model, PreTrainedModel) else None


def _model(model: object, inputs: Inputs, tokenizers: Sequence[object], *, argument: str) -> dict[str, object]:
    """The path of a model and, for one in memory, of the first of several tokenizers that is given."""
    if not isinstance(model, PreTrainedModel):
        return {"path": _stored(model, "model", inputs)}
    kind, given = type(model), [tokenizer for tokenizer in tokenizers if tokenizer is not None]
    if not kind.__module__.startswith(("transformers.", "transformers_modules.")):
        raise ConfigError(
            f"{argument}= is of type {kind.__name__}, a class of {kind.__module__}, which transformers cannot load:"
            f" the run would train a {kind.__mro__[1].__name__}.",
            remedy="Save it with its code (register_for_auto_class, save_pretrained), and give its path, with"
            " model.trust_remote_code=true.",
        )
    origin = _origin(model)
    is_gone = origin is not None and not (is_hub_name(origin) or user_path(origin).exists())
    if not given or (is_gone and given[0] == origin):
        what = (
            "was not loaded from a directory" if origin is None else f"was loaded from '{origin}', which does not exist"
        )
        raise ConfigError(
            f"{argument}= is a model that {what}, and there is no tokenizer=.",
            remedy="Give its tokenizer: tokenizer=AutoTokenizer.from_pretrained(...), or a path.",
        )
    return {"path": _stored(model, "model", inputs), "tokenizer_path": _stored(given[0], "tokenizer", inputs)}


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
        with _without_bars():
            return [inputs.keep("data.parquet", given.to_parquet)]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise DataError(
            f"{name}= is of type {type(given).__name__}.",
            remedy="Give a list of mappings, one per row; a datasets.Dataset; a pandas DataFrame; or paths of files.",
        )
    rows = list(given)
    if rows and all(isinstance(row, str | Path) for row in rows):
        if any(isinstance(row, str) and not _may_be_file(row) for row in rows):
            raise DataError(
                f"{name}= is a list of texts, which are read as names of files; {str(rows[0])!r} is none.",
                remedy='Give rows as mappings, such as {"prompt": "1+1=", "answer": "2"}.',
            )
        return list(map(str, rows))
    lines = [_line(row, number, name) for number, row in enumerate(rows, start=1)]
    if not lines:
        used = "An iterator can be read only once: give a list. " if isinstance(given, Iterator) else ""
        raise DataError(f"{name}= has no rows.", remedy=f"{used}Give at least one row, or leave it out.")
    return [inputs.keep("data.jsonl", lambda path: path.write_bytes(b"".join(lines)))]


def _may_be_file(text: str) -> bool:
    """Whether a text can be the name of a file, a pattern, or a name on the Hub or of the package: no prose."""
    return user_path(text).exists() or any(sign in text for sign in "./:*")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hides the progress bars of `datasets`, if it is used."""
    module = sys.modules.get("datasets")
    if module is None or module.are_progress_bars_disabled():
        yield
        return
    module.disable_progress_bars()
    try:
        yield
    finally:
        module.enable_progress_bars()


def _is(given: object, module: str, kind: str) -> bool:
    """Whether an object is an instance of `module.kind`, without importing the module."""
    known = vars(sys.modules[module]).get(kind) if module in sys.modules else None
    return known is not None and isinstance(given, known)


def _line(row: object, number: int, name: str) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(
            f"{name}=: row {number} is of type {type(row).__name__}.",
            remedy="Give each row as a mapping, such as {'prompt': '1+1=', 'answer': '2'}.",
        )
    try:
        return f"{json.dumps(dict(row), ensure_ascii=False, default=_json_value)}\n".encode()
    except Exception as error:  # of the row's own classes as well
        raise DataError(
            f"{name}=: row {number} cannot be written as JSON: {one_line(error)}.",
            remedy="Use text, numbers, true and false, lists and mappings of these.",
        ) from error


def _json_value(value: object) -> object:
    if isinstance(value, numpy.generic | numpy.ndarray | torch.Tensor):
        return value.tolist()
    raise TypeError(f"it has a {type(value).__name__}")


def _reward_settings(reward: object, tokenizer: object, inputs: Inputs) -> dict[str, object]:
    """The settings of functions and of at most one reward model."""
    several = list(reward) if isinstance(reward, list | tuple) else [reward]
    models = [each for each in several if _is_model(each)]
    functions = [each for each in several if not _is_model(each)]
    if len(models) > 1:
        raise ConfigError(
            f"reward= has {len(models)} reward models.",
            remedy="Give one, and the others by name: roles={'second': ...}.",
        )
    found = _under("reward.model", _scorer(models[0], tokenizer, inputs, argument="reward")) if models else {}
    return found | (
        {} if models and not functions else {"reward.functions": _functions(functions, inputs, key="reward")}
    )


def _scorer(model: object, tokenizer: object, inputs: Inputs, *, argument: str) -> dict[str, object]:
    """A reward model reads with the tokenizer that it was loaded with; one made in memory, with the policy's."""
    return _model(model, inputs, [_origin(model), tokenizer], argument=argument)


def _is_model(given: object) -> bool:
    """Whether a reward is a model: an object, a path, or a text that no function's name can be."""
    if not isinstance(given, str):
        return isinstance(given, Path | PreTrainedModel)
    return ("/" in given and ".py" not in given and "://" not in given) or (user_path(given) / "config.json").is_file()


def _functions(given: object, inputs: Inputs, *, key: str) -> list[object]:
    several = list(given) if isinstance(given, list | tuple) else [given]
    found: list[object] = []
    for each in several:
        if not isinstance(each, str) and not callable(each):
            raise ConfigError(
                f"{key}= has an object of type {type(each).__name__}.",
                remedy="Give functions, or names as in reward.functions.",
            )
        found.append(each if isinstance(each, str) else setting_of(each, inputs, key=key))
    return found


def _roles(roles: object, tokenizer: object, inputs: Inputs) -> dict[str, object]:
    if not isinstance(roles, Mapping):
        raise ConfigError(
            f"roles= is of type {type(roles).__name__}.",
            remedy="Give a mapping by name, such as {'style': my_function}.",
        )
    return {f"roles.{name}": _role(role, str(name), tokenizer, inputs) for name, role in roles.items()}


def _role(role: object, name: str, tokenizer: object, inputs: Inputs) -> dict[str, object]:
    """The settings of a role; a model given as a path or an object is its `model.path`."""
    if _is_model(role):
        role = {"model": role} | ({} if name == "reference" else {"kind": "reward_model"})
    if not isinstance(role, Mapping):
        return {"kind": "reward_function", "functions": _functions(role, inputs, key=f"roles.{name}")}
    settings = dict(role)
    model = settings.get("model")
    if isinstance(model, str | Path | PreTrainedModel):
        settings["model"] = _scorer(model, tokenizer, inputs, argument=f"roles.{name}.model")
    return {str(key): plain_value(value, inputs, key=f"roles.{name}.{key}") for key, value in settings.items()}
