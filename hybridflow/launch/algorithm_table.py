"""The table of algorithms, made from the catalogue, the functions' signatures, the presets and the dataflows."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, Method, load
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.choices import ADVANTAGE_SYNONYMS, POLICY_LOSS_SYNONYMS, PREFERENCE_SYNONYMS
from hybridflow.config.directory import config_directory
from hybridflow.dataflows.interface import Dataflow, role_needs
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.presets import Preset, presets
from hybridflow.launch.compose.trainers import shown_name
from hybridflow.launch.plan.dataflow import DATAFLOWS
from hybridflow.workers.named_functions import ESTIMATOR_OFFERS, LOSS_OFFERS, PREFERENCE_NUMBERS

_NEEDS_OF_PARAMETERS: Mapping[str, str] = {
    "values": "critic",
    "group_ids": "group",
    "baselines": "greedy pass",
    "ref_logprobs": "reference",
    "rollout_logprobs": "rollout log-probabilities",
    "components": "each reward's score",
    "sum_pi_squared": "squared probabilities",
    "ratios": "reference",
    "chosen_ratios": "reference",
    "anchor": "mismatched responses",
}
"""Requirements of a run whose function has one of these parameters without a default."""

_NUMBERS = ("gamma", "lam", "clip_low", "clip_high", "dual_clip")
_EVERY_RUN = ("actor", "rollout", "reward")


@dataclass(frozen=True)
class Entry:
    """One row of a table: an estimator, a loss or a dataflow."""

    name: str
    synonyms: tuple[str, ...]
    source: str
    place: str
    """`file:function`, in the package."""

    command: str
    """The arguments that select it."""

    needs: tuple[str, ...]
    settings: Mapping[str, object]
    """The settings that it reads, with the values that its command gives them."""


def algorithm_table() -> dict[str, list[Entry]]:
    """The rows of each table, by its heading."""
    known = presets()
    return {
        "Advantages": [_advantage(name, method, known) for name, method in ADVANTAGES.items()],
        "Policy losses": [_policy_loss(name, method, known) for name, method in POLICY_LOSSES.items()],
        "Preference losses": [_preference_loss(name, method) for name, method in PREFERENCE_LOSSES.items()],
        "Dataflows": [_dataflow(name, dataflow, known) for name, dataflow in DATAFLOWS.items()],
    }


def text_tables(tables: Mapping[str, Sequence[Entry]]) -> RenderableType:
    """One table per heading, with the command, needs and source of each entry."""
    parts: list[RenderableType] = []
    for heading, entries in tables.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bold cyan")
        table.add_column()
        for entry in entries:
            needs = f"   needs {', '.join(entry.needs)}" if entry.needs else ""
            table.add_row(entry.name, Text.assemble(entry.command, (needs, "yellow"), "\n", (entry.source, "dim")))
        parts += [Text(heading, "bold"), table, ""]
    note = "Settings are given to hybridflow ppo; hybridflow NAME is short for algorithm=NAME."
    return Group(*parts, Text(note, "dim"))


def _advantage(name: str, method: Method, known: Mapping[str, Preset]) -> Entry:
    preset = _preset(name, "advantage", known)
    settings = _numbers(method, preset) | _own(method, preset, "advantage_settings", ESTIMATOR_OFFERS)
    command = f"algorithm={preset.name}" if preset else f"algorithm=grpo algorithm.advantage={name}"
    source = f"{method.source}; whitened over the batch" if method.whitens else method.source
    place, needs = _place(method.function), _needs(method, preset)
    return Entry(name, _synonyms(name, ADVANTAGE_SYNONYMS), source, place, command, needs, settings)


def _policy_loss(name: str, method: Method, known: Mapping[str, Preset]) -> Entry:
    preset = _preset(name, "policy_loss", known)
    settings = _numbers(method, preset) | _own(method, preset, "loss_settings", LOSS_OFFERS)
    settings["algorithm.aggregation"] = method.aggregation
    command = f"algorithm={preset.name}" if preset else f"algorithm.policy_loss={name}"
    place, needs = _place(method.function), _needs(method)
    return Entry(name, _synonyms(name, POLICY_LOSS_SYNONYMS), method.source, place, command, needs, settings)


def _preference_loss(name: str, method: Method) -> Entry:
    parameters = inspect.signature(method.function).parameters
    trainer = "kto" if method.data == "labelled" else "dpo"
    numbers = vars(compose_run([], config_name=trainer).config.algorithm.preference)
    settings = {f"algorithm.preference.{n}": numbers[n] for n in PREFERENCE_NUMBERS if n in parameters}
    command = f"hybridflow {trainer if name == Algorithm().preference.loss else name}"
    place, needs = _place(method.function), _needs(method)
    return Entry(name, _synonyms(name, PREFERENCE_SYNONYMS), method.source, place, command, needs, settings)


def _dataflow(name: str, dataflow: type[Dataflow], known: Mapping[str, Preset]) -> Entry:
    roles = [role for role, need in role_needs(dataflow).items() if not need.is_optional and role not in _EVERY_RUN]
    needs = [*roles] if dataflow.data == "prompts" else [*roles, dataflow.data]
    estimator = ADVANTAGES.get(str(known[name].get("algorithm", "advantage"))) if name in known else None
    needs += _needs(estimator, known[name]) if estimator is not None else ()
    if name in known:
        command = f"algorithm={name}"
    else:
        has_trainer = (config_directory() / f"{name}.yaml").is_file()
        command = f"hybridflow {shown_name(name)}" if has_trainer else f"dataflow={name}"
    preset, defaults = known.get(name), vars(dataflow.Settings())
    settings = {f"dataflow_settings.{n}": _of(preset, v, "dataflow_settings", n) for n, v in defaults.items()}
    about = (inspect.getdoc(inspect.getmodule(dataflow)) or "").partition("\n")[0]
    return Entry(name, (), about.rstrip("."), _place(dataflow), command, tuple(dict.fromkeys(needs)), settings)


def _preset(name: str, key: str, known: Mapping[str, Preset]) -> Preset | None:
    """The preset that makes this choice: the one of the same name if possible, else the one with fewest settings."""
    choosing = [preset for preset in known.values() if preset.get("algorithm", key) == name]
    if key == "policy_loss" and name == Algorithm().policy_loss:
        choosing += [preset for preset in known.values() if preset.get("algorithm", key) is None]
    return min(choosing, key=lambda preset: (preset.name != name, preset.num_settings), default=None)


def _needs(method: Method, preset: Preset | None = None) -> tuple[str, ...]:
    """Requirements of the function's parameters, and roles of the preset's dataflow that not every run has."""
    required = inspect.signature(method.function).parameters.keys() - _defaults(method.function).keys()
    found = [need for name, need in _NEEDS_OF_PARAMETERS.items() if name in required]
    dataflow = DATAFLOWS.get(str(preset.get("dataflow"))) if preset else None
    if dataflow is not None:
        found += [r for r, need in role_needs(dataflow).items() if not need.is_optional and r not in _EVERY_RUN]
    if preset is not None and preset.get("algorithm", "kl", "placement") not in (None, "none"):
        found.append("reference")
    return tuple(dict.fromkeys(found))


def _numbers(method: Method, preset: Preset | None) -> dict[str, object]:
    """The numbers of the section `algorithm` that are parameters of the function, with the preset's values."""
    names = [name for name in inspect.signature(method.function).parameters if name in _NUMBERS]
    return {f"algorithm.{name}": _of(preset, vars(Algorithm())[name], "algorithm", name) for name in names}


def _own(method: Method, preset: Preset | None, table: str, offers: Sequence[str]) -> dict[str, object]:
    """The method's own settings: fixed by its catalogue entry, set by the preset, or default."""
    defaults = {**(_defaults(load(method.prepare)) if method.prepare else {}), **_defaults(method.function)}
    own = {name: method.settings.get(name, default) for name, default in defaults.items() if name not in offers}
    return {f"algorithm.{table}.{name}": _of(preset, value, "algorithm", table, name) for name, value in own.items()}


def _of(preset: Preset | None, default: object, *path: str) -> object:
    given = preset.get(*path) if preset else None
    return default if given is None else given


def _defaults(function: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _synonyms(name: str, synonyms: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(other for other, meant in synonyms.items() if meant == name)


def _place(found: object) -> str:
    module = inspect.getmodule(found)
    assert module is not None and (inspect.isfunction(found) or inspect.isclass(found)), f"{found} has no file"
    return f"{module.__name__.removeprefix('hybridflow.').replace('.', '/')}.py:{found.__name__}"
