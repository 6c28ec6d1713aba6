"""Engines over toy models, and a loss that any of them can take."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import ref

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.model import Dtype, Model
from hybridflow.config.training import Optimizer, Training
from hybridflow.engines.training.factory import make_language_engine, make_value_engine
from hybridflow.engines.training.interface import Loss, LossFn, TrainEngine
from hybridflow.engines.training.single import SingleEngine
from hybridflow.observability.metrics import total
from hybridflow.parallel.groups import Ranks
from tests.toys import numbers_like, sequences

GENTLE = Optimizer(learning_rate=0.01, epsilon=1e-3)
"""With AdamW's usual epsilon, rounding noise in gradients near zero becomes steps of the size of the rate."""


def language_engine(directory: Path, *, steps: int = 100, **settings: object) -> SingleEngine:
    """A single engine for the causal model in a directory; `settings` are fields of `Training`."""
    return _engine(make_language_engine, directory, steps, settings)


def value_engine(directory: Path, *, steps: int = 100, **settings: object) -> SingleEngine:
    """A single engine for a value model on the backbone in a directory."""
    return _engine(make_value_engine, directory, steps, settings)


def _engine(make, directory: Path, steps: int, settings: dict[str, object]) -> SingleEngine:
    dtype = settings.pop("dtype", Dtype.float32)
    engine = make(
        Model(path=str(directory), dtype=dtype),
        Training(**({"optimizer": GENTLE} | settings)),
        total_optimizer_steps=steps,
        device=torch.device("cpu"),
        ranks=Ranks.alone(),
    )
    assert isinstance(engine, SingleEngine)
    return engine


def _likelihood_loss(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
    """Minus the log-probability of the tokens that count."""
    loss = -(outputs["logprobs"] * columns["response_mask"]).sum()
    return Loss(loss, {"loss": total(float(loss.detach()))})


def _squared_loss(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
    """The squared distance of values from `returns`, over the tokens that count."""
    loss = ((outputs["values"] - columns["returns"]).square() * columns["response_mask"]).sum()
    return Loss(loss, {"loss": total(float(loss.detach()))})


likelihood_loss, squared_loss = LossFn(("logprobs",), _likelihood_loss), LossFn(("values",), _squared_loss)


def with_returns(seed: int = 0) -> Batch:
    """A batch for `squared_loss`."""
    batch = sequences(seed=seed)
    return batch.with_columns(tokens={"returns": numbers_like(batch.tokens("response_ids"), seed=seed)})


def summed(*, times: float) -> LossFn:
    """The sum of all log-probabilities, multiplied."""
    return LossFn(("logprobs",), lambda outputs, columns: Loss(outputs["logprobs"].sum() * times, {}))


def weights(engine: SingleEngine) -> dict[str, Tensor]:
    """A copy of all weights by name."""
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def largest_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest difference of any two weights of one name."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)


def is_freed_at_once(made: Callable[[], TrainEngine], batch: Batch) -> bool:
    """Whether an engine that has made a step goes with the last reference to it, not when cycles are collected."""
    engine = made()
    engine.train_step(batch, likelihood_loss, temperature=1.0)
    watched = ref(engine)
    gc.disable()
    try:
        del engine
        return watched() is None
    finally:
        gc.enable()
