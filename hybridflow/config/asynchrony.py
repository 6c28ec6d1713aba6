"""Settings of asynchronous training: how far generation runs ahead, and how old the samples of an update may be."""

from dataclasses import dataclass
from typing import Annotated

from hybridflow.config.ranges import AT_LEAST_0, AT_LEAST_1
from hybridflow.config.section import Section


@dataclass
class Asynchrony(Section):
    """Generating ahead: while a batch is trained on, the rollout already generates later ones, with older weights."""

    max_staleness: Annotated[int, AT_LEAST_0] = 0
    """Largest number of publications of weights between the weights that generated a token and those that are trained
    on it; time in the queue counts. 0: synchronous; each batch is generated with the weights that it trains."""

    ahead: Annotated[int, AT_LEAST_1] = 1
    """Batches that are generated before the step that trains on them; at most `max_staleness` of them are. A larger
    number only helps if generation times vary from batch to batch."""

    @property
    def depth(self) -> int:
        """Batches that are generated ahead: a batch is asked for only when it can still be trained on."""
        return min(self.ahead, self.max_staleness)
