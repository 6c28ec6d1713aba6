"""The plain training engine: the whole model on one device."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.config.training import Training
from hybridflow.engines.training.interface import LossFn, TokenOutputs
from hybridflow.engines.training.microbatch import MicroBatch, columns_of, make_microbatches
from hybridflow.engines.training.optimizer import MasterAdamW, make_optimizer, optimizer_state, restore_optimizer
from hybridflow.engines.training.outputs import ModelT, Predictor
from hybridflow.engines.training.schedule import learning_rate
from hybridflow.errors import EngineError
from hybridflow.observability.metrics import Metrics, last, mean, merge
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh

OPTIMIZER_FILE = "optimizer.pt"
MODEL_DIRECTORY = "huggingface"


class SingleEngine(Generic[ModelT]):
    """One model, one device, AdamW; implements `TrainEngine`.

    engine = SingleEngine(model, language_outputs, training=config.actor, total_optimizer_steps=300, ...)
    logprobs = engine.forward(batch).tokens("logprobs")
    metrics = engine.train_step(minibatch, loss_fn)
    """

    def __init__(
        self,
        model: ModelT,
        predict: Predictor[ModelT],
        *,
        training: Training,
        total_optimizer_steps: int,
        pad_token_id: int,
        save_model: Callable[[ModelT, Path], None],
        load_model: Callable[[Path], ModelT],
    ) -> None:
        self.mesh = ParallelMesh({"data": 1})
        self.model = model
        self.device = next(model.parameters()).device
        self._predict = predict
        self._training = training
        self._total_steps = total_optimizer_steps
        self._pad_token_id = pad_token_id
        self._save_model = save_model
        self._load_model = load_model
        self._made_optimizer: MasterAdamW | None = None
        self._steps = 0

    def forward(self, batch: Batch) -> Batch:
        """See `TrainEngine.forward`."""
        with torch.no_grad():
            parts = [(micro, self._predict(self.model, micro, _temperature(batch))) for micro in self._micros(batch)]
        order = torch.cat([micro.rows for micro, _ in parts]).argsort()
        names = ("logprobs", "entropy", "values")
        tokens = {name: _unpadded(parts, name).select(order) for name in names if getattr(parts[0][1], name).numel()}
        return Batch.of(tokens=tokens)

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        """See `TrainEngine.train_step`. Raises `EngineError` when the gradient is not finite."""
        rate = learning_rate(self._steps, optimizer=self._training.optimizer, total_steps=self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.model.zero_grad(set_to_none=True)
        reports = []
        for micro in self._micros(batch):
            outputs = self._predict(self.model, micro, _temperature(batch))
            loss = loss_fn(outputs, columns_of(batch, micro, self.device))
            loss.value.backward()
            reports.append(loss.metrics)
        norm = self._clipped_grad_norm()
        self._optimizer.step()
        self._steps += 1
        return merge(reports) | {"grad_norm": mean(norm), "lr": last(rate)}

    def weight_shards(self) -> Iterator[WeightShard]:
        """See `TrainEngine.weight_shards`: all of each weight."""
        for name, parameter in self.model.named_parameters():
            yield WeightShard.full(name, parameter.data)

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """See `TrainEngine.bind`: binds where shape, dtype and device agree."""
        bound = set()
        for name, parameter in self.model.named_parameters():
            slot = slots[name].tensor if name in slots else None
            if slot is None or (slot.shape, slot.dtype, slot.device) != (
                parameter.shape,
                parameter.dtype,
                parameter.device,
            ):
                continue
            with torch.no_grad():
                slot.copy_(parameter)
            parameter.data = slot
            bound.add(name)
        return bound

    def save(self, directory: Path) -> None:
        """See `TrainEngine.save`."""
        self._save_model(self.model, directory / MODEL_DIRECTORY)
        torch.save({"steps": self._steps, "optimizer": optimizer_state(self._optimizer)}, directory / OPTIMIZER_FILE)

    def load(self, directory: Path) -> None:
        """See `TrainEngine.load`."""
        weights = dict(self._load_model(directory / MODEL_DIRECTORY).named_parameters())
        own = dict(self.model.named_parameters())
        for name in [*own, *weights]:
            if name not in own or name not in weights or weights[name].shape != own[name].shape:
                raise EngineError(
                    f"The checkpoint {directory} is of another model: '{name}' is {_shape(weights.get(name))} there"
                    f" and {_shape(own.get(name))} here.",
                    remedy="Resume with the model the run was started with (model.path, critic.model.path).",
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        saved = torch.load(directory / OPTIMIZER_FILE, map_location=self.device, weights_only=True)
        self._steps = saved["steps"]
        restore_optimizer(self._optimizer, saved["optimizer"])

    @property
    def _optimizer(self) -> MasterAdamW:
        """Made when first needed: a frozen model never has one."""
        if self._made_optimizer is None:
            self._made_optimizer = make_optimizer(self.model, self._training.optimizer)
        return self._made_optimizer

    def _micros(self, batch: Batch) -> Iterator[MicroBatch]:
        batch.require(("prompt_ids", "response_ids"), stage="training engine")
        return make_microbatches(
            batch,
            budget_tokens=self._training.microbatch_tokens,
            pad_token_id=self._pad_token_id,
            device=self.device,
        )

    def _clipped_grad_norm(self) -> float:
        limit = self._training.optimizer.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True))
        if norm != norm or norm == float("inf"):
            raise EngineError(
                f"The gradient's norm is {norm} at optimizer step {self._steps + 1}.",
                remedy="Lower the learning rate, or look at the last samples and rewards for values out of range.",
            )
        return norm


def _temperature(batch: Batch) -> float:
    return float(batch.meta.get("temperature", 1.0))


def _shape(weight: Tensor | None) -> str:
    return "absent" if weight is None else str(tuple(weight.shape))


def _unpadded(parts: list[tuple[MicroBatch, TokenOutputs]], name: str) -> Ragged:
    return Ragged.concat(
        [Ragged.from_padded(getattr(outputs, name).float().cpu(), micro.lengths) for micro, outputs in parts]
    )
