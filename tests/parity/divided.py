"""The same training on one device and on many: programs for ranks, and what they are compared by."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.model import Dtype, Model
from hybridflow.config.placement import Parallelism
from hybridflow.config.training import Optimizer, Training, TrainingEngine
from hybridflow.engines.training.factory import make_language_engine, make_value_engine
from hybridflow.engines.training.interface import LossFn, TrainEngine
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh
from hybridflow.workers.objectives import Denominators, policy_objective, value_objective
from tests.spmd import run_ranks
from tests.toys import TEMPERATURE, numbers_like, sequences, stepped

OPTIMIZER = Optimizer(learning_rate=1e-2, epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.5)
"""Epsilon 1e-3: with 1e-8, rounding noise in gradients near zero becomes whole steps of the learning rate."""

ALGORITHM = Algorithm(clip_low=0.2, clip_high=0.3, entropy_coefficient=0.05, value_clip=0.2)

UNCLIPPED = replace(ALGORITHM, clip_low=1.0, clip_high=100.0, value_clip=None)
"""For bfloat16: rounding must not carry a ratio over a bound, which is a gradient that one training alone has."""


TOLERANCE = {"numbers": 5e-5, "outputs": 5e-5, "weights": 2e-6}
"""float32 sums in another order, through five steps; a lost row or token moves a weight by 1e-3."""

BFLOAT16_TOLERANCE = {"numbers": 0.2, "outputs": 0.25, "weights": 0.012}
"""Two bfloat16 trainings cannot agree better than either agrees with float32, and one device is 0.0093 away from its
own float32 training in the worst weight (1.0 and the next bfloat16 number, 1.0078, are nearly as far apart). A lost row
moves a weight by 0.06 under the policy's loss and by 0.025 under the critic's."""


@dataclass(frozen=True)
class Case:
    """A model, how it is spread, and how it is trained."""

    directory: Path
    ranks: int = 1
    engine: TrainingEngine = TrainingEngine.single
    sizes: dict[str, int] = field(default_factory=dict)
    kind: str = "language"
    steps: int = 5
    settings: dict[str, object] = field(default_factory=dict)
    dtype: Dtype = Dtype.float32
    with_padding: bool = False
    """The padding token stands among the tokens of prompts and responses, as one that is sampled or ends turns."""
    with_prefixes: bool = False
    """Rows share prompts, and some the beginnings of responses."""
    lost_rows: int = 0
    """Rows of each batch that nobody is given."""
    first_step: int = 0
    resume_from: Path | None = None
    save_to: Path | None = None
    """Where the engine is saved after the last step."""


@dataclass
class Trained:
    """What a training gave: of one rank, or of all together."""

    losses: list[float]
    norms: list[float]
    outputs: list[Tensor]
    weights: dict[str, Tensor]
    shards: list[WeightShard] = field(default_factory=list)


def largest_differences(left: Trained, right: Trained) -> dict[str, float]:
    """How far two trainings are apart: relative in losses and norms, absolute in outputs and weights."""
    assert left.weights.keys() == right.weights.keys()
    numbers = torch.tensor([left.losses + left.norms, right.losses + right.norms], dtype=torch.float64)
    outputs = zip(left.outputs, right.outputs, strict=True)
    weights = [(left.weights[name], right.weights[name]) for name in left.weights]
    return {
        "numbers": float(((numbers[0] - numbers[1]) / numbers[1].abs().clamp(min=0.1)).abs().max()),
        "outputs": max(float((a - b).abs().max()) for a, b in outputs),
        "weights": max(float((a - b).abs().max()) for a, b in weights),
    }


def assert_equal(found: Trained, expected: Trained, tolerance: dict[str, float] = TOLERANCE) -> None:
    """Two trainings are the same but for the order of sums."""
    differences = largest_differences(found, expected)
    assert all(differences[what] < limit for what, limit in tolerance.items()), differences


class OnOneDevice:
    """Cases as one device trains them without sharing prefixes, each once."""

    def __init__(self) -> None:
        self._made: dict[str, Trained] = {}

    def __call__(self, case: Case) -> Trained:
        settings = {name: value for name, value in case.settings.items() if name in ("optimizer", "lora")}
        settings["share_prefixes"] = False
        alone = replace(case, ranks=1, engine=TrainingEngine.single, sizes={}, settings=settings, lost_rows=0)
        if str(alone) not in self._made:
            self._made[str(alone)] = train(alone)
        return self._made[str(alone)]


def on(engine: str, *values: object, slow: bool = False):
    """A case of an engine, with its marks."""
    marks = [pytest.mark.megatron] * (engine == "megatron") + [pytest.mark.slow] * slow
    return pytest.param(engine, *values, marks=marks)


def mesh_of(case: Case) -> ParallelMesh:
    """The mesh of a case's ranks, in the order of training meshes."""
    inner = {axis: case.sizes.get(axis, 1) for axis in ("pipeline", "sequence", "tensor")}
    divided = inner["pipeline"] * inner["sequence"] * inner["tensor"]
    return ParallelMesh({"data": case.ranks // divided, **inner})


def engine_of(case: Case, rank: int = 0) -> TrainEngine:
    """The engine of one rank of a case."""
    make = make_language_engine if case.kind == "language" else make_value_engine
    training = Training(
        **({"engine": case.engine, "parallelism": Parallelism(**case.sizes), "optimizer": OPTIMIZER} | case.settings)
    )
    return make(
        Model(path=str(case.directory), dtype=case.dtype),
        training,
        total_optimizer_steps=100,
        device=torch.device("cpu"),
        ranks=Ranks(rank, mesh_of(case)),
    )


def global_batch(seed: int, kind: str) -> Batch:
    """Rows of unequal lengths with everything that the policy's or the critic's loss asks for."""
    batch = sequences((3, 1, 7, 4, 2, 5), (5, 9, 1, 4, 2, 3), seed=seed)
    ids = batch.tokens("response_ids")
    if kind == "language":
        old, advantages = numbers_like(ids, seed=seed, scale=0.3), numbers_like(ids, seed=seed + 10)
        return batch.with_columns(tokens={"old_logprobs": old.like(old.values - 4.0), "advantages": advantages})
    values, returns = numbers_like(ids, seed=seed, scale=0.1), numbers_like(ids, seed=seed + 10)
    return batch.with_columns(tokens={"values": values, "returns": returns})


def with_padding_among(batch: Batch) -> Batch:
    """The batch with every fourth of its kinds of tokens become the padding token (0)."""
    names = ("prompt_ids", "response_ids")
    columns = {name: batch.tokens(name) for name in names}
    changed = {n: c.like(torch.where(c.values % 4 == 0, 0, c.values)) for n, c in columns.items()}
    assert all((column.values == 0).any() for column in changed.values())
    return batch.with_columns(tokens=changed)


def with_shared_prefixes(batch: Batch) -> Batch:
    """The batch with prompts of 12 tokens for the first three rows, which go on alike in two, and of 9 for two more."""
    prompts, responses = (
        [row.tolist() for row in batch.tokens(name).rows()] for name in ("prompt_ids", "response_ids")
    )
    prompts[:3] = [[*range(2, 14)], [*range(2, 24)], [*range(2, 24)]]
    prompts[3:5] = [[*range(20, 29)]] * 2
    responses[4][:2] = responses[3][:2]
    columns = {"prompt_ids": prompts, "response_ids": responses}
    return batch.with_columns(tokens={name: Ragged.from_rows(rows, torch.int64) for name, rows in columns.items()})


def loss_of(batch: Batch, kind: str, dtype: Dtype = Dtype.float32) -> LossFn:
    """The loss of a whole batch, by its denominators."""
    algorithm = ALGORITHM if dtype is Dtype.float32 else UNCLIPPED
    if kind == "language":
        return policy_objective(algorithm, Denominators.of(batch), norm_tokens=16)
    return value_objective(algorithm, Denominators.of(batch))


def own_rows(batch: Batch, index: int, count: int) -> Batch:
    """A data rank's rows: unequal numbers of them."""
    edges = [round(len(batch) * (i / count) ** 1.3) for i in range(count + 1)]
    return batch.slice(edges[index], edges[index + 1])


def train_rank(rank: int, case: Case) -> bytes:
    """The training of a case on one of its ranks, pickled: tensors are not to be shared with a process that ends."""
    mesh, engine = mesh_of(case), engine_of(case, rank)
    ranks = Ranks(rank, mesh)
    trained = Trained([], [], [], {})
    name, loss_name = ("logprobs", "actor/pg_loss") if case.kind == "language" else ("values", "critic/vf_loss")
    if case.resume_from is not None:
        engine.load(case.resume_from)
    for step in range(case.first_step, case.first_step + case.steps):
        batch = global_batch(step, case.kind)
        batch = with_padding_among(batch) if case.with_padding else batch
        batch = with_shared_prefixes(batch) if case.with_prefixes else batch
        kept = batch.slice(0, len(batch) - case.lost_rows)
        rows = own_rows(kept, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        trained.outputs.append(engine.forward(rows, (name,), temperature=TEMPERATURE).tokens(name).values)
        metrics = stepped(engine, rows, loss_of(batch, case.kind, case.dtype))
        own = torch.tensor([metrics[loss_name].value if loss_name in metrics else 0.0], dtype=torch.float64)
        trained.losses.append(float(ranks.sum(own, "data")))
        trained.norms.append(metrics["grad_norm"].value)
    if case.save_to is not None:
        engine.save(case.save_to)
    trained.shards = copies(engine)
    return pickle.dumps(trained)


def train(case: Case) -> Trained:
    """The training of a case on all its ranks together."""
    answers = [train_rank(0, case)] if case.ranks == 1 else run_ranks(train_rank, case.ranks, case)
    return together(case, [pickle.loads(answer) for answer in answers])


def together(case: Case, answers: Sequence[Trained]) -> Trained:
    """What the ranks of a case say, as one; ranks that must agree are checked to."""
    for answer in answers:
        assert answer.norms == answers[0].norms, "ranks disagree on the gradient's norm"
    mesh = mesh_of(case)
    firsts = [mesh.rank({"data": index, "pipeline": -1}) for index in range(mesh.axis_size("data"))]
    outputs = [torch.cat(step) for step in zip(*(answers[rank].outputs for rank in firsts), strict=True)]
    weights = assembled([shard for answer in answers for shard in answer.shards])
    return Trained(answers[firsts[0]].losses, answers[0].norms, outputs, weights)


def copies(engine: TrainEngine) -> list[WeightShard]:
    """A rank's shards, in memory of their own."""
    return [WeightShard(shard.name, shard.tensor.detach().clone(), shard.layout) for shard in engine.weight_shards()]


def assembled(shards: Sequence[WeightShard]) -> dict[str, Tensor]:
    """Whole weights from the shards of all ranks; every element is held, and equal wherever it is held twice."""
    weights: dict[str, Tensor] = {}
    for shard in shards:
        whole = weights.setdefault(shard.name, torch.full(shard.layout.shape, torch.nan, dtype=shard.tensor.dtype))
        place = whole[tuple(slice(low, high) for low, high in shard.layout.box)]
        known = ~place.isnan()
        assert torch.equal(place[known], shard.tensor[known]), f"two ranks hold different numbers of {shard.name}"
        place.copy_(shard.tensor)
    missing = [name for name, weight in weights.items() if weight.isnan().any()]
    assert not missing, f"no rank holds all of {missing}"
    return weights
