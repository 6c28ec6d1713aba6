"""The simplest training engine: the whole model on one device."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.interface import LossFn, Part
from hybridflow.engines.training.optimizer import MasterAdamW, make_optimizer
from hybridflow.engines.training.passes import accumulate_gradients, forward_pass
from hybridflow.engines.training.setup import EngineSetup, prepared
from hybridflow.engines.training.shell import EngineShell
from hybridflow.engines.training.slot_memory import slot_memory
from hybridflow.engines.training.state_files import MODEL_DIRECTORY, SAME_MODEL, ShardsOf, SteppedTensor
from hybridflow.errors import EngineError
from hybridflow.models.adapters.lora import initialize
from hybridflow.models.adapters.merging import merged_shards
from hybridflow.models.compilation import compile_layers
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.models.packed_attention import is_packed
from hybridflow.models.shard_files import PlannedDirectory
from hybridflow.observability.metrics import Metrics
from hybridflow.parallel.layout import WeightShard


class SingleEngine(EngineShell[MasterAdamW]):
    """One model, one device, AdamW; implements `TrainEngine`.

    engine = SingleEngine(EngineSetup(LANGUAGE, config.actor.model, config.actor, 300, device, Ranks.alone()))
    logprobs = engine.forward(batch, ("logprobs",), temperature=1.0).tokens("logprobs")
    metrics = engine.train_step(minibatch, loss_fn, temperature=1.0)
    """

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.model = setup.load(setup.directory)
        self.adapter = setup.add_adapter(self.model)
        if self.adapter is not None:
            initialize(self._held_shards())
        self._outputs = prepared(setup, self.model)
        if setup.training.compile:
            compile_layers(setup.kind.backbone(self.model))
        self._is_packed = is_packed(setup.kind.backbone(self.model))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32  # gradients of microbatches are summed without rounding
        self._bound: set[str] = set()

    def forward(self, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True) -> Batch:
        self.onload(Part.parameters)
        with nullcontext() if adapted or self.adapter is None else self.adapter.off():
            return forward_pass(self._outputs, self._microbatches(batch), outputs, temperature=temperature)

    def train_step(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> Metrics:
        """See `TrainEngine.train_step`. Raises `NumericError` for a step that the guards refuse."""
        self.onload(Part.parameters)
        optimizer = self.optimizer
        self.model.zero_grad(set_to_none=True)
        micros = self._microbatches(batch)
        metrics = accumulate_gradients(self._outputs, batch, micros, loss_fn, temperature=temperature)
        limit = self._training.optimizer.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True))
        metrics = self.optimizer_step(norm, optimizer.step_at, metrics)
        self.model.zero_grad(set_to_none=True)
        return metrics

    def weight_shards(self) -> Iterator[WeightShard]:
        """See `TrainEngine.weight_shards`: all of each weight."""
        self.onload(Part.parameters)
        held = self._held_shards()
        return held if self.adapter is None else merged_shards(held, self.adapter)

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """See `TrainEngine.bind`: binds if dtype, device and memory layout agree."""
        self.onload(Part.parameters)
        slots = self._bindable(slots)
        names = set()
        for parameter_name, parameter in self.model.named_parameters():
            own = _pieces(parameter_name, parameter.data)
            memory = slot_memory(own, slots)
            if memory is None:
                continue
            assert len(memory) == parameter.numel(), f"{parameter_name}: {len(memory)} of {parameter.numel()} elements"
            with torch.no_grad():
                parameter.data = memory.copy_(parameter.flatten()).view(parameter.shape)
            self._bound.add(parameter_name)
            names |= {shard.name for shard in own}
        return names

    def _make_optimizer(self) -> MasterAdamW:
        return make_optimizer([parameter for parameter, _ in self._trained()], self._training.optimizer)

    def _move_parameters(self, pool: HostPool, *, away: bool) -> None:
        free = {name: p.data for name, p in self.model.named_parameters() if name not in self._bound}
        moved = pool.put(free) if away else pool.take([*free])
        for name, memory in moved.items():
            self.model.get_parameter(name).data = memory

    def _held_shards(self) -> Iterator[WeightShard]:
        for name, parameter in self.model.named_parameters():
            yield from _pieces(name, parameter.data)

    def _stepped_tensors(self) -> Iterator[SteppedTensor]:
        return self.optimizer.stepped_tensors(self._trained())

    @property
    def _is_in_pieces(self) -> bool:
        """Whether its weights are written one by one; otherwise only transformers knows their names on disk."""
        return self.adapter is not None or self._setup.has_known_names

    def _plan_weights(self, directory: Path) -> list[PlannedDirectory]:
        if self._is_in_pieces:
            return super()._plan_weights(directory)
        self._setup.save(self.model, directory / MODEL_DIRECTORY)
        return []

    def _load_weights(self, directory: Path) -> None:
        if self._is_in_pieces:
            super()._load_weights(directory)
            return
        whole = self._setup.load(directory / MODEL_DIRECTORY)
        try:
            self.model.load_state_dict(whole.state_dict())
        except RuntimeError as error:
            raise EngineError(
                f"The checkpoint {directory} belongs to a different model: {error}", remedy=SAME_MODEL
            ) from error

    def _trained(self) -> Iterator[tuple[Tensor, ShardsOf]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield parameter, partial(_pieces, name)


def _pieces(name: str, tensor: Tensor) -> list[WeightShard]:
    return views(tensor, parts_of(name, tensor.shape))
