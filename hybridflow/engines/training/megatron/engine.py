"""The training engine on Megatron-Core: tensor, pipeline, expert and data parallelism, distributed optimizer."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.interface import LossFn, Part
from hybridflow.engines.training.megatron.architecture import (
    check_model,
    divides_tokens,
    has_fused_activation,
    transformer_config,
)
from hybridflow.engines.training.megatron.attention import make_rotary
from hybridflow.engines.training.megatron.model import make_chunks
from hybridflow.engines.training.megatron.optimizer import ChunkOptimizer
from hybridflow.engines.training.megatron.parameters import WaitingParameters, bind_parameters, held_shards
from hybridflow.engines.training.megatron.pipeline import (
    LossFunc,
    ReportT,
    metrics_of_last_stage,
    outputs_of_last_stage,
    run_pipeline,
)
from hybridflow.engines.training.megatron.process_groups import activate
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.passes import joined_outputs, loss_of
from hybridflow.engines.training.setup import VALUE, EngineSetup
from hybridflow.engines.training.shell import EngineShell
from hybridflow.engines.training.state_files import SteppedTensor
from hybridflow.models.geometry import read_geometry
from hybridflow.models.loading import read_description, torch_dtype
from hybridflow.models.shard_files import read_into
from hybridflow.observability.activity import ACTIVITY
from hybridflow.observability.metrics import Metrics, merge
from hybridflow.parallel.layout import WeightShard


class MegatronEngine(EngineShell[ChunkOptimizer]):
    """A model sharded over the ranks of a mesh; implements `TrainEngine`. All ranks create and call it together.

        engine = MegatronEngine(EngineSetup(LANGUAGE, config.actor.model, config.actor, 300, device, ranks))
        logprobs = engine.forward(own_rows, ("logprobs",), temperature=1.0).tokens("logprobs")
        metrics = engine.train_step(own_minibatch, loss_fn, temperature=1.0)

    Only ranks that differ in `data` get different rows. All pipeline stages return the outputs of the last one. Tested
    on CPUs with gloo and on one GPU; not yet run on several GPUs with NCCL.
    """

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        parallelism = setup.training.parallelism
        geometry = read_geometry(setup.directory)
        description = read_description(setup.directory, trust_remote_code=setup.model.trust_remote_code)
        check_model(geometry, description)
        self._config = transformer_config(
            geometry,
            description,
            parallelism,
            dtype=torch_dtype(setup.model.dtype),
            recompute=bool(setup.training.gradient_checkpointing),
            fused_activation=has_fused_activation(self.device),
        )
        self._multiple = parallelism.tensor if divides_tokens(geometry, parallelism) else 1
        self._rotary = make_rotary(description, self.device)
        self._parallelism = parallelism
        activate(parallelism)
        with self.device:
            self.chunks = make_chunks(
                self._config,
                geometry,
                is_value=setup.kind is VALUE,
                padding_token=description.get_text_config().pad_token_id,
            )
        self._parameters = WaitingParameters(self.chunks)
        read_into(setup.directory, self.weight_shards(), zero_if_absent=("score.weight", "score.bias"))

    def forward(self, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True) -> Batch:
        """See `TrainEngine.forward`. Adapters are not supported."""
        self.onload(Part.parameters)
        for chunk in self.chunks:
            chunk.eval()

        def loss_func(micro: MicroBatch, outputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            ACTIVITY.advance()
            on_cpu = {name: flat.float().cpu() for name, flat in outputs.items()}
            return next(iter(outputs.values())).sum(), on_cpu

        micros = self._micros(batch)
        reports = self._run(micros, loss_func, outputs, temperature=temperature, with_gradient=False)
        return joined_outputs(zip(micros, outputs_of_last_stage(reports), strict=True))

    def train_step(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> Metrics:
        """See `TrainEngine.train_step`. Raises `NumericError` for a step that the guards refuse."""
        self.onload(Part.parameters)
        optimizer = self.optimizer
        for chunk in self.chunks:
            chunk.train()

        def loss_func(micro: MicroBatch, outputs: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            loss = loss_of(loss_fn, batch, micro, outputs)
            return loss.value, loss.metrics

        optimizer.zero_grad()
        with optimizer.reducing():
            micros = self._micros(batch)
            reports = self._run(micros, loss_func, loss_fn.outputs, temperature=temperature, with_gradient=True)
        metrics = metrics_of_last_stage(merge(reports))
        norm = optimizer.grad_norm()
        metrics = self.optimizer_step(norm, lambda rate: optimizer.step(norm, learning_rate=rate), metrics)
        if self._training.offload_optimizer:
            optimizer.free_gradients()
        return metrics

    def weight_shards(self) -> Iterator[WeightShard]:
        """See `TrainEngine.weight_shards`: the parameters themselves, without the vocabulary's padding."""
        self.onload(Part.parameters)
        return self._held_shards()

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """See `TrainEngine.bind`: binds parameters that lie entirely in a slot, contiguous or not."""
        self.onload(Part.parameters)
        return bind_parameters(self.chunks, slots)

    def _make_optimizer(self) -> ChunkOptimizer:
        activate(self._parallelism)
        replicas = self.mesh.axis_size("data")
        divided = self._parallelism.distributed_optimizer and replicas > 1
        return ChunkOptimizer(self.chunks, self._config, self._training.optimizer, divided=divided, replicas=replicas)

    def _move_parameters(self, pool: HostPool, *, away: bool) -> None:
        self._parameters.move(pool, away=away)

    def _held_shards(self) -> Iterator[WeightShard]:
        return held_shards(self.chunks)

    def _stepped_tensors(self) -> Iterator[SteppedTensor]:
        return self.optimizer.stepped_tensors()

    def _run(
        self,
        micros: list[MicroBatch],
        loss_func: LossFunc[ReportT],
        outputs: tuple[str, ...],
        *,
        temperature: float,
        with_gradient: bool,
    ) -> list[ReportT]:
        activate(self._parallelism)
        optimizer = self.made_optimizer
        return run_pipeline(
            self.chunks if optimizer is None else optimizer.modules,
            micros,
            loss_func,
            outputs=outputs,
            temperature=temperature,
            rotary=self._rotary,
            with_gradient=with_gradient,
        )

    def _micros(self, batch: Batch) -> list[MicroBatch]:
        """The same number on every rank with expert parallelism, because ranks exchange tokens in every layer.

        With virtual stages, a multiple of the pipeline ranks, which the interleaved schedule requires.
        """
        rounds = self._parallelism.pipeline if self._parallelism.virtual_pipeline > 1 else 1
        return self._microbatches(
            batch, multiple_of=self._multiple, in_step=self._parallelism.expert > 1, rounds_of=rounds
        )
