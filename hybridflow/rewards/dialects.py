"""The reward function signatures of several libraries: recognized by parameter names, each called in its own way."""

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol, runtime_checkable

from hybridflow.config.user_code import ending_forks, named_parameters
from hybridflow.observability.metrics import Metrics, mean
from hybridflow.rewards.interface import Samples, text_of

Function = Callable[..., object]

FILTER_SCORES = "scores"
"""Scores that an OpenRLHF function may return in addition to its rewards; dynamic filtering compares groups by them."""

_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY


@runtime_checkable
class Listable(Protocol):
    """A tensor or array of any library; without importing one, the processes of a pool stay small."""

    def tolist(self) -> object:
        """The values as a list, or the value of a scalar."""
        ...


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function that is called with keywords; `settled` are bound to their values already."""

    named: tuple[str, ...]
    required: frozenset[str]
    takes_any: bool
    settled: frozenset[str] = frozenset()

    def without(self, names: Collection[str]) -> "Parameters":
        """The parameters after some have been bound to values."""
        named = tuple(name for name in self.named if name not in names)
        return Parameters(named, self.required - set(names), self.takes_any, frozenset(names))

    def accepted(self, offered: Mapping[str, object]) -> dict[str, object]:
        """The offered arguments that the function accepts."""
        return {
            name: value
            for name, value in offered.items()
            if name in self.named or (self.takes_any and name not in self.settled)
        }


def parameters_of(function: Function) -> Parameters | None:
    """The parameters of a function; None if they cannot be determined or cannot be given by keyword."""
    try:
        found, named = inspect.signature(function).parameters.values(), named_parameters(function).values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is _POSITIONAL_ONLY for parameter in named):
        return None
    return Parameters(
        named=tuple(parameter.name for parameter in named),
        required=frozenset(parameter.name for parameter in named if parameter.default is inspect.Parameter.empty),
        takes_any=any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found),
    )


@dataclass
class Answers:
    """A function's result, not yet checked, and its logged values."""

    values: object
    metrics: Metrics = field(default_factory=dict)
    extras: dict[str, list] = field(default_factory=dict)


@dataclass(frozen=True)
class Dialect:
    """One library's convention for reward functions.

    `known_by`: the parameters by which it is recognized; the function names all of them. `offers`: the arguments that
    can be passed. `columns`: whether columns of the data are passed too. `is_each`: called with one sample at a time.
    `has_filter_scores`: its extras may contain `FILTER_SCORES`.
    """

    name: str
    signature: str
    known_by: tuple[str, ...]
    offers: tuple[str, ...]
    columns: bool
    call: Callable[[Function, Parameters, Samples], Answers]
    is_each: bool = False
    has_filter_scores: bool = False


def dialect_of(parameters: Parameters) -> Dialect | None:
    """The first dialect whose parameters the function names and that offers all it requires; None without one."""
    for dialect in DIALECTS:
        if all(name in parameters.named for name in dialect.known_by) and fits(dialect, parameters):
            return dialect
    return NATIVE if parameters.takes_any and parameters.required <= set(NATIVE.offers) else None


def _call_trl(function: Function, parameters: Parameters, samples: Samples) -> Answers:
    answers = Answers(None)
    logged: dict[str, list[float]] = {}

    def log_metric(name: str, value: float) -> None:
        logged.setdefault(name, []).append(float(value))

    def log_extra(column: str, values: list) -> None:
        answers.extras[column] = list(values)

    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(samples.prompts, samples.completions, strict=True)
    ]
    offered = _further(samples) | {"prompts": samples.prompts, "completions": completions}
    # Passed only if named, so that **columns holds nothing but columns.
    named = {"completion_ids": samples.completion_ids, "log_metric": log_metric, "log_extra": log_extra}
    offered |= {name: value for name, value in named.items() if name in parameters.named}
    answers.values = _answer(function(**parameters.accepted(offered)))
    answers.metrics = {name: mean(math.fsum(values) / len(values), len(samples)) for name, values in logged.items()}
    return answers


def _call_verl(function: Function, parameters: Parameters, samples: Samples) -> Answers:
    answers = _answer_of_each(
        function,
        parameters,
        solution_str=samples.completions,
        ground_truth=_column(samples, "answer", "ground_truth"),
        data_source=_column(samples, "data_source"),
        extra_info=[{} if info is None else info for info in _column(samples, "extra_info")],
    )
    scores = [answer.get("score", answer) if isinstance(answer, Mapping) else answer for answer in answers]
    further = [{k: v for k, v in a.items() if k != "score"} if isinstance(a, Mapping) else {} for a in answers]
    extras = {str(key): [more.get(key) for more in further] for key in dict.fromkeys(k for m in further for k in m)}
    return Answers(scores, _means(extras), extras)


def _call_openrlhf(function: Function, parameters: Parameters, samples: Samples) -> Answers:
    prompts = [text_of(prompt) for prompt in samples.prompts]
    queries = [prompt + text for prompt, text in zip(prompts, samples.completions, strict=True)]
    labels = _column(samples, "answer", "label")
    offered = {"queries": queries, "prompts": prompts, "labels": labels}
    answer = _answer(function(**parameters.accepted(offered)))
    if not isinstance(answer, Mapping):
        return Answers(answer)
    logs = {str(name): as_list(values) for name, values in dict(answer.get("extra_logs") or {}).items()}
    if answer.get("scores") is not None:
        logs[FILTER_SCORES] = [as_list(score)[0] for score in as_list(answer["scores"])]
    of_samples = {name: values for name, values in logs.items() if len(values) == len(samples)}
    return Answers(answer.get("rewards", answer), _means(logs), of_samples)


def _call_trlx(function: Function, parameters: Parameters, samples: Samples) -> Answers:
    prompts = [text_of(prompt) for prompt in samples.prompts]
    joined = [prompt + text for prompt, text in zip(prompts, samples.completions, strict=True)]
    offered = _further(samples) | {"samples": joined, "prompts": prompts, "outputs": samples.completions}
    return Answers(_answer(function(**parameters.accepted(offered))))


def _call_torchforge(function: Function, parameters: Parameters, samples: Samples) -> Answers:
    prompts = [text_of(prompt) for prompt in samples.prompts]
    targets = _column(samples, "answer", "target")
    return Answers(_answer_of_each(function, parameters, prompt=prompts, response=samples.completions, target=targets))


NATIVE = Dialect(
    "TRL",
    "f(prompts, completions, **columns)",
    known_by=("completions",),
    offers=("prompts", "completions", "completion_ids", "log_metric", "log_extra"),
    columns=True,
    call=_call_trl,
)
DIALECTS = (
    NATIVE,
    Dialect(
        "verl",
        "compute_score(data_source, solution_str, ground_truth, extra_info)",
        known_by=("solution_str", "ground_truth"),
        offers=("data_source", "solution_str", "ground_truth", "extra_info"),
        columns=False,
        call=_call_verl,
        is_each=True,
    ),
    Dialect(
        "OpenRLHF",
        "reward_func(queries, prompts, labels)",
        known_by=("queries", "prompts"),
        offers=("queries", "prompts", "labels"),
        columns=False,
        call=_call_openrlhf,
        has_filter_scores=True,
    ),
    Dialect(
        "trlX",
        "reward_fn(samples, prompts, outputs, **columns)",
        known_by=("samples",),
        offers=("samples", "prompts", "outputs"),
        columns=True,
        call=_call_trlx,
    ),
    Dialect(
        "TorchForge",
        "f(prompt, response, target)",
        known_by=("prompt", "response"),
        offers=("prompt", "response", "target"),
        columns=False,
        call=_call_torchforge,
        is_each=True,
    ),
)


def dialect_named(name: str) -> Dialect | None:
    """The dialect of a prefix in `reward.functions`, such as `verl` or `trl`."""
    return next((dialect for dialect in DIALECTS if dialect.name.lower() == name), None)


def fits(dialect: Dialect, parameters: Parameters) -> bool:
    """Whether a dialect can pass all arguments that a function requires, possibly as columns of the data."""
    return dialect.columns or parameters.required <= set(dialect.offers)


def as_list(values: object) -> list:
    """A list, tuple, array or tensor as a list; anything else as a list with one element."""
    if isinstance(values, list | tuple):
        return list(values)
    if isinstance(values, Listable):
        found = values.tolist()
        return found if isinstance(found, list) else [found]
    return [values]


def _answer(result: object) -> object:
    """The result of a call; a coroutine is awaited first."""
    return _awaited([result])[0] if inspect.isawaitable(result) else result


def _answer_of_each(function: Function, parameters: Parameters, **columns: list) -> list:
    """Calls a function sample by sample; the coroutines of an asynchronous one are awaited concurrently."""
    rows = zip(*columns.values(), strict=True)
    results = [function(**parameters.accepted(dict(zip(columns, row, strict=True)))) for row in rows]
    return _awaited(results) if any(inspect.isawaitable(result) for result in results) else results


def _awaited(results: Sequence[object]) -> list:
    """Awaits in a thread of its own, because this one may already run an event loop."""

    async def gathered() -> list:
        async def one(result: object) -> object:
            with ending_forks():
                return await result if inspect.isawaitable(result) else result

        return await asyncio.gather(*(one(result) for result in results))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, gathered()).result()


def _column(samples: Samples, *names: str) -> list:
    """For each sample, the first value in the named columns that is not None; None without one."""
    found = [samples.columns[name] for name in names if name in samples.columns]
    return [
        next((values[index] for values in found if values[index] is not None), None) for index in range(len(samples))
    ]


def _further(samples: Samples) -> dict[str, object]:
    """The columns of the data that are not passed under another name."""
    return {name: values for name, values in samples.columns.items() if name not in ("prompt", "completion")}


def _means(columns: Mapping[str, list]) -> Metrics:
    """The mean of the finite numbers of each column that has any."""
    numbers = {
        name: [float(value) for value in values if isinstance(value, Real) and math.isfinite(value)]
        for name, values in columns.items()
    }
    return {name: mean(math.fsum(found) / len(found), len(found)) for name, found in numbers.items() if found}
