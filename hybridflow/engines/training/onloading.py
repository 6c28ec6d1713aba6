"""Parts of an engine that come back to its device for as long as something needs them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hybridflow.engines.training.interface import Part, TrainEngine


@contextmanager
def everything_here(engine: TrainEngine, away: Collection[Part]) -> Iterator[None]:
    """Meanwhile all parts are on the engine's device; those that are `away` now go back there afterwards."""
    leaving = tuple(away)
    engine.onload(*Part)
    try:
        yield
    finally:
        engine.offload(*leaving)
