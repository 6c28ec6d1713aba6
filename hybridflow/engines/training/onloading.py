"""An engine's weights, back on its device for as long as something needs them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hybridflow.engines.training.interface import Part, TrainEngine


@contextmanager
def weights_here(engine: TrainEngine, away: Collection[Part]) -> Iterator[None]:
    """Meanwhile the weights are on the engine's device; if they are `away` now, they go back there afterwards.

    The optimizer's state stays where it is: it may not fit beside them.
    """
    leaving = {Part.parameters} & set(away)
    engine.onload(Part.parameters)
    try:
        yield
    finally:
        engine.offload(*leaving)
