"""The training engine on FSDP2: Hugging Face models with FSDP, HSDP, tensor and sequence parallelism."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hybridflow.algorithms.vocabulary_parallel import vocabulary_parallel_outputs
from hybridflow.batch import Batch
from hybridflow.engines.training.fsdp.adapters import gathered_downs
from hybridflow.engines.training.fsdp.mesh import ShardMesh
from hybridflow.engines.training.fsdp.sequence import SequenceParallelOutputs
from hybridflow.engines.training.fsdp.sharding import (
    bind_parameter,
    clipped_norm,
    finish_sharding,
    held_shards,
    reset_on_failure,
    reshard,
    rows_of,
    shard_model,
)
from hybridflow.engines.training.fsdp.tensor_parallel import divide_matrices
from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.interface import LossFn, Part
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.optimizer import MasterAdamW, make_optimizer
from hybridflow.engines.training.outputs import LanguageOutputs
from hybridflow.engines.training.passes import accumulate_gradients, forward_pass
from hybridflow.engines.training.setup import LANGUAGE, EngineSetup, prepared
from hybridflow.engines.training.shell import EngineShell
from hybridflow.engines.training.state_files import ShardsOf, SteppedTensor
from hybridflow.models.adapters.lora import initialize, is_adapter_weight
from hybridflow.models.adapters.merging import merged_shards
from hybridflow.models.compilation import compile_layers
from hybridflow.models.heads import ValueModel
from hybridflow.models.packed_attention import is_packed
from hybridflow.models.shard_files import read_into
from hybridflow.observability.metrics import Metrics
from hybridflow.parallel.layout import WeightShard


class FsdpEngine(EngineShell[MasterAdamW]):
    """A model sharded over the ranks of a mesh; implements `TrainEngine`. All ranks create and call it together.

    engine = FsdpEngine(EngineSetup(LANGUAGE, config.actor.model, config.actor, 300, device, ranks))
    logprobs = engine.forward(own_rows, ("logprobs",), temperature=1.0).tokens("logprobs")
    metrics = engine.train_step(own_minibatch, loss_fn, temperature=1.0)
    """

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._shards = ShardMesh(setup.ranks, setup.training.parallelism.replicas, setup.device)
        self.model = setup.skeleton()
        self.adapter = setup.add_adapter(self.model)
        self._outputs = self._parallelized(self.model)
        if setup.training.compile:
            compile_layers(setup.kind.backbone(self.model))
        self._is_packed = is_packed(setup.kind.backbone(self.model))
        self._parameters = shard_model(self._outputs, self.model, self._shards)
        for parameter in self._parameters:
            parameter.place(torch.zeros(parameter.padded_numel, dtype=parameter.shard.dtype, device=self.device))
        finish_sharding(self._outputs)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(self.device), name not in module._non_persistent_buffers_set)
        held = list(self._held_shards())
        initialize(held)
        own = [shard for shard in held if not is_adapter_weight(shard.name)]
        read_into(setup.directory, own, zero_if_absent=("score.weight", "score.bias"))

    def forward(self, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True) -> Batch:
        self.onload(Part.parameters)
        micros = self._micros(batch)
        kind = nullcontext() if adapted or self.adapter is None else self.adapter.off()
        with kind, reset_on_failure(self._outputs):
            result = forward_pass(self._outputs, micros, outputs, temperature=temperature)
        reshard(self._outputs)
        return result

    def train_step(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> Metrics:
        """See `TrainEngine.train_step`. Raises `NumericError` for a step that the guards refuse."""
        self.onload(Part.parameters)
        optimizer = self.optimizer
        self._clear_gradients()
        micros = self._micros(batch)
        with reset_on_failure(self._outputs):
            metrics = accumulate_gradients(
                self._outputs,
                batch,
                micros,
                loss_fn,
                temperature=temperature,
                before_backward=self._reduce_over_replicas,
            )
        for parameter in self._parameters:
            parameter.take_gradient()
        limit = self._training.optimizer.max_grad_norm or float("inf")
        norm = clipped_norm(self._parameters, self._shards, limit=limit)
        metrics = self.optimizer_step(norm, optimizer.step_at, metrics)
        self._clear_gradients()
        return metrics

    def weight_shards(self) -> Iterator[WeightShard]:
        """See `TrainEngine.weight_shards`: rows of each weight, or none if there are fewer rows than ranks."""
        self.onload(Part.parameters)
        held = self._held_shards()
        if self.adapter is None:
            return held
        return merged_shards(held, self.adapter, gathered_downs(self._parameters, self._shards))

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """See `TrainEngine.bind`: binds shards that are whole rows of a slot, unless FSDP pads them."""
        self.onload(Part.parameters)
        slots = self._bindable(slots)
        return {name for parameter in self._parameters for name in bind_parameter(parameter, slots)}

    @property
    def _num_replicas(self) -> int:
        return self._training.parallelism.replicas

    def _make_optimizer(self) -> MasterAdamW:
        return make_optimizer([piece for piece, _ in self._trained()], self._training.optimizer)

    def _move_parameters(self, pool: HostPool, *, away: bool) -> None:
        free = {parameter.name: parameter for parameter in self._parameters if not parameter.is_bound}
        moved = pool.put({name: parameter.memory for name, parameter in free.items()}) if away else pool.take([*free])
        for name, parameter in free.items():
            parameter.place(moved[name])

    def _stepped_tensors(self) -> Iterator[SteppedTensor]:
        return self.optimizer.stepped_tensors(self._trained())

    def _trained(self) -> list[tuple[Tensor, ShardsOf]]:
        """The shards that the optimizer steps, and the weights in each."""
        return [(p.shard, partial(held_shards, p)) for p in self._parameters if p.trained and p.shard.numel()]

    def _parallelized(self, model: PreTrainedModel | ValueModel) -> nn.Module:
        """The model with its outputs, sharded for tensor and sequence parallelism as the configuration says."""
        setup, shards = self._setup, self._shards
        outputs: nn.Module = prepared(setup, model)
        backbone = setup.kind.backbone(model)
        if shards.tensor_size > 1:
            divide_matrices(backbone, shards.tensor)
            if setup.kind is LANGUAGE:
                vocabulary = backbone.config.get_text_config().vocab_size
                first, end = rows_of(vocabulary, shards.tensor_size, shards.tensor_index)
                group = shards.tensor.get_group()
                combine = partial(vocabulary_parallel_outputs, first_column=first, vocabulary=vocabulary, group=group)
                outputs = LanguageOutputs(backbone, columns=end - first, outputs_of=combine)
        group = setup.ranks.group("sequence")
        return outputs if group is None else SequenceParallelOutputs(outputs, backbone, group)

    def _held_shards(self) -> Iterator[WeightShard]:
        for parameter in self._parameters:
            yield from held_shards(parameter)

    def _micros(self, batch: Batch) -> list[MicroBatch]:
        """The same number on every rank: all ranks gather each layer together."""
        return self._microbatches(batch, multiple_of=self.mesh.axis_size("sequence"), in_step=True)

    def _reduce_over_replicas(self, is_last: bool) -> None:
        """Replicas sum their gradients once per step; the shards of a replica do so after each microbatch."""
        if isinstance(self._outputs, FSDPModule) and self._training.parallelism.replicas > 1:
            self._outputs.set_requires_all_reduce(is_last)

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.clear_gradient()
