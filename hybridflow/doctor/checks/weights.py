"""Weights sent from a training engine to a rollout engine and back, compared by checksums at every stage."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.checks.engines import missing, name_of
from hybridflow.doctor.finding import Finding, ok
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import StaleWeightsError

if TYPE_CHECKING:
    from hybridflow.calibration.processes import Place as Rank

_WHAT = "weights"
_MODEL = "builtin:calculator"
_LIMIT_TOKENS = 32
_SEQUENCES = 4


def _sent(training: TrainingEngine, rollout: RolloutKind, size: int, place: Place) -> Iterator[Finding]:
    name = name_of(_WHAT, training, rollout)
    if absent := next(missing(name, training, rollout), None):
        yield absent
        return
    place.doing(f"importing {training.name} and {rollout}")
    import torch

    from hybridflow.calibration.processes import run_on

    kind = "cuda" if torch.cuda.device_count() >= size else "cpu"
    place.doing(f"sending weights from {training.name} to {rollout} and back")
    answers = run_on(kind, size, _round_trip, training, rollout, timeout_seconds=_seconds(rollout))
    weights, compared = answers[0][0], sum(number for _, number in answers)
    yield ok(name, f"{weights} weights from {size} x {training.name} to {rollout} and back, {compared / 1e6:.1f} MB"
             " compared by checksum")  # fmt: skip


def _round_trip(rank: "Rank", training: TrainingEngine, rollout: RolloutKind) -> tuple[int, int]:
    """The number of weights sent there and back, and the bytes compared; run by each process.

    Raises `StaleWeightsError` if a weight differs.
    """
    import torch
    import torch.distributed as dist

    from hybridflow.config.derived import training_mesh
    from hybridflow.config.model import Model
    from hybridflow.config.paths import builtin_path
    from hybridflow.config.placement import Parallelism
    from hybridflow.config.rollout import Rollout, Transfer
    from hybridflow.config.training import Training
    from hybridflow.engines.rollout.factory import make_rollout_engine
    from hybridflow.engines.training.factory import make_language_engine
    from hybridflow.parallel.groups import Ranks
    from hybridflow.parallel.mesh import ParallelMesh
    from hybridflow.resharding.resharder import Resharder
    from hybridflow.resharding.verify import checksum

    TRAINING_ENGINES[training].set_environment()
    model, mesh = Model(path=str(builtin_path(_MODEL))), ParallelMesh(training_mesh(Parallelism(), rank.size))
    trained = make_language_engine(
        model,
        Training(engine=training),
        total_optimizer_steps=1,
        device=rank.device,
        ranks=Ranks(rank.rank, mesh),
    )
    generating = make_rollout_engine(
        model,
        Rollout(engine=rollout, max_sequences=_SEQUENCES),
        limit_tokens=_LIMIT_TOKENS,
        eos_token_ids=(-1,),
        device=rank.device,
    )
    own, slots = {shard.name: shard for shard in trained.weight_shards()}, generating.weight_slots()
    group = dist.group.WORLD if rank.size > 1 else None
    there = Resharder(trained.weight_shards, slots, group=group, transfer=Transfer())
    back = Resharder(slots.values, own, group=group, transfer=Transfer())
    before, compared = {name: int(checksum(shard.tensor)) for name, shard in own.items()}, 0
    for version, (way, emptied) in enumerate(((there, slots), (back, own)), start=1):
        with torch.no_grad():
            for shard in emptied.values():
                shard.tensor.zero_()
        compared += way.transfer(version).bytes_verified
    changed = [name for name, shard in own.items() if int(checksum(shard.tensor)) != before[name]]
    if changed:
        raise StaleWeightsError(
            f"{len(changed)} of {len(own)} weights differ after they were sent to {rollout} and back, such as"
            f" '{changed[0]}'.",
            remedy="Do not train on this machine before its memory and links are checked.",
        )
    return len(slots), compared


def _seconds(rollout: RolloutKind) -> float:
    return 90.0 if rollout is RolloutKind.vllm else 60.0


_PAIRS = (
    (TrainingEngine.fsdp, RolloutKind.transformers, 2),
    (TrainingEngine.megatron, RolloutKind.transformers, 1),
    (TrainingEngine.single, RolloutKind.vllm, 1),
)
"""Every engine at least once, and one pair whose ranks hold different parts of each weight."""

CHECKS = tuple(
    Check(
        name_of(_WHAT, training, rollout),
        "starting a training and a rollout engine",
        partial(_sent, training, rollout, size),
        seconds=_seconds(rollout) + 10,
        needs=("imports", "gloo") if size > 1 else ("imports",),
    )
    for training, rollout, size in _PAIRS
)
