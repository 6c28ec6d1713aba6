"""Rules on batches: minibatches divide them, and every rank that takes part in a call is given a prompt."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hybridflow.config.derived import minibatch_prompts, pool_sizes
from hybridflow.config.experiment import Experiment
from hybridflow.controller.protocols import GENERATION, num_parts
from hybridflow.dataflows.interface import Dataflow, learns_from_samples
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.roles import CRITIC, ROLLOUT, RoleSpec
from hybridflow.workers.reward_function import RewardFunctionWorker
from hybridflow.workers.reward_model import RewardModelWorker

_JUDGES = (RewardFunctionWorker, RewardModelWorker)


def batch_errors(config: Experiment, dataflow: type[Dataflow], specs: Sequence[RoleSpec]) -> Iterator[ConfigError]:
    """Minibatches that do not divide the batch, and roles with more ranks than a batch has prompts."""
    batch = config.data.batch_size
    for spec in specs:
        ranks = _data_ranks(config, spec)
        if spec.is_trained:
            yield from _minibatches(config, spec, ranks)
        elif spec.view_of is None and spec.generation_mesh is None and dataflow.data == "prompts" and batch < ranks:
            yield ConfigError(
                f"data.batch_size={batch} prompts cannot be divided over the {ranks} ranks of '{spec.name}'.",
                remedy=f"Give data.batch_size={ranks} or more, or {_fewer_devices(spec.name)}.",
            )
        if spec.generation_mesh is not None and learns_from_samples(dataflow):
            replicas = num_parts(GENERATION, spec.generation_mesh)
            if batch < replicas:
                yield ConfigError(
                    f"data.batch_size={batch} prompts cannot be divided over the {replicas} rollout replicas.",
                    remedy=f"Use {replicas} or more, or a larger rollout.parallelism.tensor.",
                )


def evaluation_errors(
    config: Experiment, specs: Sequence[RoleSpec], *, questions: int, sources: Sequence[str]
) -> Iterator[ConfigError]:
    """Roles with more ranks than there are held-out rows.

    `questions` held-out prompts are answered and scored. `sources` has the source of each held-out row that a loss is
    measured on, each source on its own. 0 and none: there is no such evaluation.
    """
    for spec in specs:
        role = spec.name if spec.generation_mesh is None else ROLLOUT
        if questions and (spec.generation_mesh is not None or spec.worker_class in _JUDGES):
            mesh = spec.generation_mesh
            ranks = _data_ranks(config, spec) if mesh is None else num_parts(GENERATION, mesh)
            if questions < ranks:
                yield ConfigError(
                    f"data.eval_files: {questions} prompts cannot be divided over the {ranks} ranks of '{role}'.",
                    remedy=f"Give {ranks} prompts or more, or {_fewer_devices(role)}.",
                )
    for source, rows in Counter(sources).items():
        for spec in specs:
            ranks = _data_ranks(config, spec)
            if spec.is_trained and rows < ranks:
                yield ConfigError(
                    f"data.eval_files: {rows} rows of '{source}' cannot be divided over the {ranks} ranks of"
                    f" '{spec.name}'.",
                    remedy=f"Give {ranks} or more of each source, or place {spec.name} on fewer devices.",
                )


def _minibatches(config: Experiment, spec: RoleSpec, ranks: int) -> Iterator[ConfigError]:
    """Those of a trained role: roles of the kind critic are trained as the section `critic` says."""
    assert spec.training is not None, f"{spec.name} is not trained"
    is_further = spec.name in config.roles
    section = CRITIC if is_further or spec.name == CRITIC else "actor"
    batch, prompts = config.data.batch_size, minibatch_prompts(config, spec.training)
    if batch % prompts:
        close = min((size for size in range(1, batch + 1) if batch % size == 0), key=lambda size: abs(size - prompts))
        yield ConfigError(
            f"{section}.minibatch_size={prompts} does not divide data.batch_size={batch}.",
            remedy=f"Use {close}, or another divisor: both count prompts, over all devices.",
        )
    elif prompts < ranks:
        key = f"{section}.minibatch_size" if spec.training.minibatch_size else "data.batch_size"
        sizes = f"roles.{spec.name}" if is_further else section
        yield ConfigError(
            f"{key}={prompts} prompts cannot be divided over the {ranks} data-parallel ranks of {spec.name}.",
            remedy=f"Use {ranks} or more, or larger sizes in {sizes}.parallelism.",
        )


def _data_ranks(config: Experiment, spec: RoleSpec) -> int:
    return pool_sizes(config)[spec.pool] if spec.mesh is None else spec.mesh.axis_size("data")


def _fewer_devices(role: str) -> str:
    return f"place {role} on fewer devices (placement.pools, placement.roles.{role})"
