"""Pairs of a training and a rollout engine, as the checks that start engines name them."""

from collections.abc import Iterator

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.doctor.finding import Finding, skipped
from hybridflow.engines.traits import ROLLOUT_ENGINES, TRAINING_ENGINES


def name_of(what: str, training: TrainingEngine, rollout: RolloutKind) -> str:
    """The name of a check of a pair, one engine of which is the simplest of its kind: `run fsdp`, `weights vllm`."""
    return f"{what} {training.name if rollout is RolloutKind.transformers else rollout}"


def missing(name: str, training: TrainingEngine, rollout: RolloutKind) -> Iterator[Finding]:
    """A finding for each engine of a pair that is not installed."""
    for traits in (TRAINING_ENGINES[training], ROLLOUT_ENGINES[rollout]):
        if not traits.is_installed:
            yield skipped(name, f"{traits.package} is not installed (the extra {' or '.join(traits.extras)})")
