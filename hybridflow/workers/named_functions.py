"""Estimators and losses that the configuration names; each is called with the arguments that its parameters name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from torch import Tensor

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, Function, Method, load
from hybridflow.config.algorithm import Algorithm, KLPlacement
from hybridflow.config.choices import chosen, is_own
from hybridflow.config.nearest import did_you_mean, known_settings
from hybridflow.config.user_code import load_member, named_parameters
from hybridflow.errors import ConfigError, raised_together

ESTIMATOR_COLUMNS = ("values", "baselines", "components", "old_logprobs", "sum_pi_squared", "ref_logprobs")
"""Columns of the batch that an estimator may read."""

ESTIMATOR_OFFERS = ("rewards", "scores", "mask", "group_ids", *ESTIMATOR_COLUMNS, "gamma", "lam", "reduce")
"""Everything that an estimator may name: `rewards` [B, R] and their sums `scores` [B], the mask [B, R], `group_ids` [B]
(equal for samples of one prompt), columns, numbers of the configuration, and `reduce`, a sum over ranks."""

PROVIDED_COLUMNS = ("values", "baselines")
"""Columns that only some dataflows provide (`Dataflow.provides`)."""

LOSS_COLUMNS = ("old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "rewards", "scores")
"""Columns of the batch that a loss may read."""

LOSS_OFFERS = ("logprobs", "entropy", "mask", *LOSS_COLUMNS, "clip_low", "clip_high", "dual_clip")
"""Everything that a loss may name: `logprobs` and `entropy` [B, R] of the policy, columns, and numbers."""

PREFERENCE_NUMBERS = ("beta", "label_smoothing", "margin", "desirable_weight", "undesirable_weight")
"""Numbers of `algorithm.preference` that a preference loss may name."""

PAIR_OFFERS = (
    *(f"{which}_{what}" for which in ("chosen", "rejected") for what in ("ratios", "means", "sums", "tokens")),
    "margins",
    *PREFERENCE_NUMBERS,
)
"""Everything that a loss of pairs may name, each [N]: for both responses the sum of log pi - log pi_ref, the mean and
the sum of log pi, and the number of tokens; the data's `margins`; and numbers."""

LABEL_OFFERS = ("ratios", "means", "sums", "tokens", "is_chosen", "anchor", *PREFERENCE_NUMBERS)
"""Everything that a loss of labeled responses may name: the same for each response [N], its label, KTO's z0, and
numbers."""

PREFERENCE_OFFERS = {"preferences": PAIR_OFFERS, "labelled": LABEL_OFFERS}
"""Everything that a preference loss may name, by the data that the dataflow learns from."""

Answer = TypeVar("Answer")

_KEYS = {
    "advantage": ("algorithm.advantage", "algorithm.advantage_settings"),
    "loss": ("algorithm.policy_loss", "algorithm.loss_settings"),
    "preference": ("algorithm.preference.loss", "algorithm.loss_settings"),
}

_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_KINDS = {bool: "true or false", (int, float): "a number", str: "text", (list, tuple): "a list", dict: "a mapping"}
"""Types of settings, by the type of the default: an integer is accepted for a float."""


@dataclass(frozen=True)
class NamedFunction:
    """A function of the catalogue or the user's own, and its settings; a call passes on the arguments that it names."""

    name: str
    method: Method
    settings: Mapping[str, object]

    @property
    def parameters(self) -> frozenset[str]:
        """The names of the function's parameters."""
        return frozenset(named_parameters(self.method.function))

    @property
    def needs(self) -> frozenset[str]:
        """The parameters without a default."""
        return frozenset(_without_default(self.method.function))

    @property
    def prepares_from(self) -> frozenset[str]:
        """The parameters of `prepare`."""
        return frozenset() if self.prepare is None else frozenset(named_parameters(self.prepare))

    @property
    def prepare(self) -> Function | None:
        """The function that computes columns for the loss from the whole minibatch, if there is one."""
        return None if self.method.prepare is None else load(self.method.prepare)

    @property
    def watches(self) -> dict[str, Function]:
        """The functions of the loss's metrics, by metric."""
        return {metric: load(path) for metric, path in self.method.watches.items()}

    def __call__(self, offered: Mapping[str, object]) -> Tensor | tuple[Tensor, Tensor]:
        """The function's result."""
        return called(self.method.function, {**offered, **self.settings})


def called(function: Callable[..., Answer], offered: Mapping[str, object]) -> Answer:
    """The function's result for those of the offered values that its parameters name."""
    names = named_parameters(function)
    return function(**{name: value for name, value in offered.items() if name in names})


def token_numbers(answer: object, mask: Tensor, *, of: str) -> Tensor:
    """A function's result; raises `ConfigError` unless it has a finite number for each token of the mask [B, R]."""
    if not isinstance(answer, Tensor) or answer.shape != mask.shape:
        found = f"shape {list(answer.shape)}" if isinstance(answer, Tensor) else f"type {type(answer).__name__}"
        raise ConfigError(
            f"{of} returned a value of {found}.",
            remedy=f"Return a tensor [B, R] like the mask, here {list(mask.shape)}: a number for each token.",
        )
    wrong = ~answer.detach().isfinite() & mask.bool()
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ConfigError(
            f"{of} returned {answer[row, token].item()} for token {token} of row {row}; {int(wrong.sum())} of"
            f" {int(mask.sum())} tokens have no finite number.",
            remedy="Look for divisions by 0, logarithms of 0 and rewards out of range; sum no masked tokens.",
        )
    return answer


def estimator(algorithm: Algorithm) -> NamedFunction:
    """The estimator of `algorithm.advantage`; raises `ConfigError` if it cannot be called."""
    name, method = _method("algorithm.advantage", algorithm.advantage, ADVANTAGES)
    bound = _bound(name, method, algorithm.advantage_settings, ESTIMATOR_OFFERS, "advantage")
    if algorithm.kl.placement is KLPlacement.reward and not bound.parameters & {"rewards", "scores"}:
        raise ConfigError(
            f"algorithm.kl.placement=reward, but algorithm.advantage={name} reads neither rewards nor scores, so the"
            " penalty would be lost.",
            remedy="Use algorithm.kl.placement=loss.",
        )
    return bound


def provided_for(name: str) -> frozenset[str]:
    """The columns of `PROVIDED_COLUMNS` that an estimator of the catalogue reads."""
    return frozenset(named_parameters(ADVANTAGES[name].function)) & {*PROVIDED_COLUMNS}


def policy_loss(algorithm: Algorithm) -> NamedFunction:
    """The loss of `algorithm.policy_loss`; raises `ConfigError` if it cannot be called."""
    name, method = _method("algorithm.policy_loss", algorithm.policy_loss, POLICY_LOSSES)
    prepared = () if method.prepare is None else tuple(_without_default(method.function))
    return _bound(name, method, algorithm.loss_settings, (*LOSS_OFFERS, *prepared), "loss")


def preference_loss(algorithm: Algorithm, offers: Sequence[str]) -> NamedFunction:
    """The loss of `algorithm.preference.loss`, given `offers`; raises `ConfigError` if it cannot be called."""
    name, method = _method("algorithm.preference.loss", algorithm.preference.loss, PREFERENCE_LOSSES)
    return _bound(name, method, algorithm.loss_settings, offers, "preference")


def _method(key: str, value: str, table: Mapping[str, Method]) -> tuple[str, Method]:
    """The entry that a setting names, or one for the user's own function, and its name."""
    name = chosen(value, key, table)
    if not is_own(name):
        return name, table[name]
    function = load_member(name, key=key)
    if not callable(function):
        raise ConfigError(
            f"{key}={name} is of type {type(function).__name__}, not a function.", remedy="Name a function."
        )
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}={name}: its parameters cannot be read: {error}.", remedy="Name a function written in Python."
        ) from error
    return name, Method(cast(Function, function), source=name)


def _bound(
    name: str, method: Method, settings: Mapping[str, object], offers: Sequence[str], kind: str
) -> NamedFunction:
    key, settings_key = _KEYS[kind]
    parameters = named_parameters(method.function)
    wrong = [n for n, p in parameters.items() if p.kind is _POSITIONAL_ONLY]
    wrong += [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in offers]
    wrong = [n for n in wrong if n not in settings and n not in method.settings]
    if wrong:
        raise ConfigError(
            f"{key}={name}: there is no argument for its parameter '{wrong[0]}': {_shown(method.function)}.",
            remedy=f"{did_you_mean(wrong[0], offers)}Parameters may be: {', '.join(offers)}; any other needs a default"
            f" and is set with {settings_key}.",
        )
    if not set(parameters) & set(offers):
        raise ConfigError(
            f"{key}={name}: {_shown(method.function)} has no parameter for the batch.",
            remedy=f"Parameters may be: {', '.join(offers)}.",
        )
    own = [
        n for n, p in _all_parameters(method).items() if p.default is not inspect.Parameter.empty and n not in offers
    ]
    with raised_together() as faults:
        for setting, value in settings.items():
            if setting not in own and (setting not in parameters or setting in offers):
                remedy = f"{did_you_mean(setting, own)}{known_settings(f'{key}={name}', own)}"
                faults.add(ConfigError(f"There is no setting '{settings_key}.{setting}'.", remedy=remedy))
            elif not _is_like(value, default := _all_parameters(method)[setting].default):
                wrong_type = f"{settings_key}.{setting}={value} has the wrong type ({type(value).__name__})."
                remedy = f"Give {_kind_of(default)}; the default is {default!r}."
                faults.add(ConfigError(wrong_type, remedy=remedy))
    return NamedFunction(name, method, {**method.settings, **settings})


def _without_default(function: Callable) -> list[str]:
    return [name for name, found in named_parameters(function).items() if found.default is inspect.Parameter.empty]


def _all_parameters(method: Method) -> Mapping[str, inspect.Parameter]:
    prepare = {} if method.prepare is None else named_parameters(load(method.prepare))
    return {**prepare, **named_parameters(method.function)}


def _is_like(value: object, default: object) -> bool:
    """Whether a setting has the type of its default; with the default None any type will do."""
    kinds = [kind for kind in _KINDS if isinstance(default, kind)]
    return not kinds or (isinstance(value, kinds[0]) and isinstance(value, bool) is isinstance(default, bool))


def _kind_of(default: object) -> str:
    return next(word for kind, word in _KINDS.items() if isinstance(default, kind))


def _shown(function: Callable) -> str:
    name = function.__name__ if inspect.isroutine(function) or inspect.isclass(function) else type(function).__name__
    return f"{name}({', '.join(inspect.signature(function).parameters)})"
