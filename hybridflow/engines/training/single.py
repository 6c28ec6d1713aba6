"""The plain training engine: the whole model on one device."""

from collections.abc import Iterator, Mapping, Set
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridflow.batch import Batch
from hybridflow.engines.training.families import EngineSetup, prepared
from hybridflow.engines.training.finite_weights import check_finite
from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.interface import LossFn, Part
from hybridflow.engines.training.microbatch import MicroBatch, make_microbatches
from hybridflow.engines.training.optimizer import make_optimizer
from hybridflow.engines.training.optimizer_files import ShardsOf, load_optimizer, save_optimizer
from hybridflow.engines.training.passes import accumulate_gradients, forward_pass
from hybridflow.engines.training.shell import EngineShell
from hybridflow.engines.training.slot_memory import slot_memory
from hybridflow.engines.training.state_files import MODEL_DIRECTORY
from hybridflow.errors import EngineError
from hybridflow.models.adapters.lora import initialize
from hybridflow.models.adapters.merging import merged_shards
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.observability.metrics import Metrics
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
        self._bound: set[str] = set()
        self._shell = EngineShell(
            setup,
            make_optimizer=partial(make_optimizer, self.model, setup.training.optimizer),
            move_parameters=partial(_move_parameters, self.model, self._bound),
        )

    def forward(self, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True) -> Batch:
        """See `TrainEngine.forward`."""
        self.onload(Part.parameters)
        with nullcontext() if adapted or self._adapter is None else self._adapter.off():
            return forward_pass(self._outputs, self._micros(batch), outputs, temperature=temperature)

    def train_step(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> Metrics:
        """See `TrainEngine.train_step`. Raises `EngineError` when the gradient is not finite."""
        self.onload(Part.parameters)
        optimizer = self._shell.optimizer
        self.model.zero_grad(set_to_none=True)
        metrics = accumulate_gradients(self._outputs, batch, self._micros(batch), loss_fn, temperature=temperature)
        limit = self._training.optimizer.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True))
        metrics |= self._shell.step(norm, optimizer.step_at)
        self.model.zero_grad(set_to_none=True)
        return metrics

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
        setup, shell = self._setup, self._shell
        with shell.weights_here():
            if self._is_in_pieces:
                shell.save_weights(directory, self._held_shards, self._adapter)
            else:
                check_finite(self._held_shards(), setup.ranks)
                setup.save(self.model, directory / MODEL_DIRECTORY)
            save_optimizer(directory, shell.optimizer, self._trained(), shell.steps, setup.ranks)

    def load(self, directory: Path) -> None:
        """See `TrainEngine.load`."""
        shell = self._shell
        with shell.weights_here():
            if self._is_in_pieces:
                shell.load_weights(directory, self._held_shards(), self._adapter)
            else:
                self._load_whole(directory)
            shell.steps = load_optimizer(directory, shell.optimizer, self._trained(), self._setup.ranks)

    def offload(self, *parts: Part) -> None:
        """See `TrainEngine.offload`."""
        self._shell.offload(*parts)

    def onload(self, *parts: Part) -> None:
        """See `TrainEngine.onload`. What a method needs comes back by itself."""
        self._shell.onload(*parts)

    @property
    def _is_in_pieces(self) -> bool:
        """Its weights are written one by one; else only transformers knows what they are called on disk."""
        return self._adapter is not None or self._setup.has_known_names

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

    def _micros(self, batch: Batch) -> list[MicroBatch]:
        return make_microbatches(batch, budget_tokens=self._training.microbatch_tokens, device=self.device)


def _move_parameters(model: nn.Module, bound: Set[str], shelf: HostShelf, *, away: bool) -> None:
    free = {name: p.data for name, p in model.named_parameters() if name not in bound}
    moved = shelf.put(free) if away else shelf.take([*free])
    for name, memory in moved.items():
        model.get_parameter(name).data = memory


def _pieces(name: str, tensor: Tensor) -> list[WeightShard]:
    return views(tensor, parts_of(name, tensor.shape))
