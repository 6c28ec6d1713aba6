"""The plain training engine: the whole model on one device."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.engines.training.families import EngineSetup, prepared
from hybridflow.engines.training.finite_weights import check_finite
from hybridflow.engines.training.interface import LossFn, Part
from hybridflow.engines.training.microbatch import MicroBatch, make_microbatches
from hybridflow.engines.training.onloading import weights_here
from hybridflow.engines.training.optimizer import MasterAdamW, make_optimizer, move_optimizer
from hybridflow.engines.training.optimizer_files import ShardsOf, load_optimizer, save_optimizer
from hybridflow.engines.training.passes import accumulate_gradients, finite_norm, forward_pass
from hybridflow.engines.training.schedule import learning_rate
from hybridflow.engines.training.slot_memory import slot_memory
from hybridflow.engines.training.state_files import MODEL_DIRECTORY, load_weights, save_weights
from hybridflow.errors import EngineError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, load_adapter
from hybridflow.models.adapters.lora import initialize
from hybridflow.models.adapters.merging import merged_shards
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.observability.metrics import Metrics, last, mean
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class SingleEngine:
    """One model, one device, AdamW; implements `TrainEngine`.

    engine = SingleEngine(EngineSetup(LANGUAGE, config.actor.model, config.actor, 300, device, Ranks.alone()))
    logprobs = engine.forward(batch, ("logprobs",), temperature=1.0).tokens("logprobs")
    metrics = engine.train_step(minibatch, loss_fn, temperature=1.0)
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.mesh = ParallelMesh({"data": 1})
        self.model = setup.load(setup.directory)
        self.device = setup.device
        self._setup = setup
        self._training = setup.training
        self._adapter = setup.add_adapter(self.model)
        if self._adapter is not None:
            initialize(self._held_shards())
        self._outputs = prepared(setup, self.model)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32  # micro-batches add up as if they were one
        self._shelf = setup.shelf()
        self._made_optimizer: MasterAdamW | None = None
        self._bound: set[str] = set()
        self._away = {Part.optimizer} if setup.training.offload_optimizer else set[Part]()
        self._steps = 0

    def forward(self, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True) -> Batch:
        """See `TrainEngine.forward`."""
        self.onload(Part.parameters)
        with nullcontext() if adapted or self._adapter is None else self._adapter.off():
            return forward_pass(self._outputs, self._micros(batch), outputs, temperature=temperature)

    def train_step(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> Metrics:
        """See `TrainEngine.train_step`. Raises `EngineError` when the gradient is not finite."""
        self.onload(Part.parameters)
        rate = learning_rate(
            self._steps, optimizer=self._training.optimizer, total_steps=self._setup.total_optimizer_steps
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.model.zero_grad(set_to_none=True)
        metrics = accumulate_gradients(self._outputs, batch, self._micros(batch), loss_fn, temperature=temperature)
        norm = self._clipped_grad_norm()
        self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self._steps += 1
        return metrics | {"grad_norm": mean(norm), "lr": last(rate)}

    def weight_shards(self) -> Iterator[WeightShard]:
        """See `TrainEngine.weight_shards`: all of each weight."""
        self.onload(Part.parameters)
        held = self._held_shards()
        return held if self._adapter is None else merged_shards(held, self._adapter)

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """See `TrainEngine.bind`: binds where number format and device agree, and where the slots lie alike."""
        self.onload(Part.parameters)
        merged = self._adapter.adapted if self._adapter else frozenset()
        slots = {name: slot for name, slot in slots.items() if name not in merged}
        names = set()
        for parameter_name, parameter in self.model.named_parameters():
            own = _pieces(parameter_name, parameter.data)
            memory = slot_memory(own, slots)
            if memory is None or len(memory) != parameter.numel():
                continue
            with torch.no_grad():
                parameter.data = memory.copy_(parameter.flatten()).view(parameter.shape)
            self._bound.add(parameter_name)
            names |= {shard.name for shard in own}
        return names

    def save(self, directory: Path) -> None:
        """See `TrainEngine.save`."""
        ranks = self._setup.ranks
        with weights_here(self, self._away):
            check_finite(self._held_shards(), ranks)
            if self._adapter is not None:
                self._setup.save_adapter(self._adapter, self._held_shards(), directory)
            elif self._setup.has_known_names:
                save_weights(directory, self._held_shards(), ranks, write_rest=self._setup.describe)
            else:
                self._setup.save(self.model, directory / MODEL_DIRECTORY)
            save_optimizer(directory, self._optimizer, self._trained(), self._steps, ranks)

    def load(self, directory: Path) -> None:
        """See `TrainEngine.load`."""
        ranks = self._setup.ranks
        with weights_here(self, self._away):
            if self._adapter is not None:
                load_adapter(self._adapter, self._held_shards(), directory / ADAPTER_DIRECTORY)
            elif self._setup.has_known_names:
                load_weights(directory, self._held_shards(), ranks)
            else:
                self._load_whole(directory)
            self._steps = load_optimizer(directory, self._optimizer, self._trained(), ranks)

    def offload(self, *parts: Part) -> None:
        """See `TrainEngine.offload`."""
        self._move(set(parts) - self._away, away=True)
        self._away |= set(parts)

    def onload(self, *parts: Part) -> None:
        """See `TrainEngine.onload`. What a method needs comes back by itself."""
        self._move(set(parts) & self._away, away=False)
        self._away -= set(parts)

    def _move(self, parts: set[Part], *, away: bool) -> None:
        shelf = self._shelf
        if shelf is None:
            return
        if Part.parameters in parts:
            free = {name: p.data for name, p in self.model.named_parameters() if name not in self._bound}
            moved = shelf.put(free) if away else shelf.take([*free])
            for name, memory in moved.items():
                self.model.get_parameter(name).data = memory
        if Part.optimizer in parts and self._made_optimizer is not None:
            move_optimizer(self._made_optimizer, shelf, away=away)

    def _held_shards(self) -> Iterator[WeightShard]:
        """What it holds, an adapter's weights apart from those that they are added to."""
        for name, parameter in self.model.named_parameters():
            yield from _pieces(name, parameter.data)

    def _load_whole(self, directory: Path) -> None:
        whole = self._setup.load(directory / MODEL_DIRECTORY)
        try:
            self.model.load_state_dict(whole.state_dict())
        except RuntimeError as error:
            raise EngineError(
                f"The checkpoint {directory} is of another model: {error}",
                remedy="Resume with the model the run was started with (model.path, critic.model.path).",
            ) from error

    def _trained(self) -> Iterator[tuple[Tensor, ShardsOf]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield parameter, partial(_pieces, name)

    @property
    def _optimizer(self) -> MasterAdamW:
        """Made when first needed: a frozen model never has one."""
        if self._made_optimizer is None:
            self._made_optimizer = make_optimizer(self.model, self._training.optimizer)
            if Part.optimizer in self._away:
                self._move({Part.optimizer}, away=True)
        return self._made_optimizer

    def _micros(self, batch: Batch) -> list[MicroBatch]:
        return make_microbatches(batch, budget_tokens=self._training.microbatch_tokens, device=self.device)

    def _clipped_grad_norm(self) -> float:
        limit = self._training.optimizer.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True))
        return finite_norm(norm, step=self._steps + 1)


def _pieces(name: str, tensor: Tensor) -> list[WeightShard]:
    return views(tensor, parts_of(name, tensor.shape))
