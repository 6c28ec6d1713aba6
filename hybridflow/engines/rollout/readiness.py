"""Whether an engine may answer: awake, and with whole weights of one version."""

from hybridflow.errors import EngineError, StaleWeightsError

UNWRITTEN = "have not been written yet"
BEING_WRITTEN = "are being written, or a transfer that wrote them failed"
GIVEN_BACK = "were given back while it slept"


class Readiness:
    """What `generate` asks first; shared by all rollout engines.

    States: weights whole <-> incomplete (`lose_weights`, `gain_weights`), awake <-> asleep.
    """

    def __init__(self, missing: str | None = None) -> None:
        self.version = 0
        self.is_asleep = False
        self._missing = missing

    def lose_weights(self, reason: str) -> None:
        """The weights are not whole from now on; `reason` completes "The rollout's weights ..."."""
        self._missing = reason

    def gain_weights(self, version: int) -> None:
        """The weights are whole and of one version again."""
        self._missing = None
        self.version = version

    def check(self) -> None:
        """Raises unless the engine may answer."""
        if self.is_asleep:
            raise EngineError("The rollout engine sleeps.", remedy="Call wake() before generate().")
        if self._missing is not None:
            raise StaleWeightsError(
                f"The rollout's weights {self._missing}.",
                remedy="Publish the weights (write every slot, then weights_changed) before the next generate.",
            )
