"""Checks the numbers of an optimizer step before it is taken, and compares the weights of replicas."""

import hashlib
import logging
import math
from collections.abc import Iterable
from struct import iter_unpack, pack

from hybridflow.config.guards import GuardAction, Guards
from hybridflow.errors import NumericError
from hybridflow.observability.metrics import Metrics, maximum, mean
from hybridflow.parallel.collectives import all_gather_bytes
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.verify import checksum

logger = logging.getLogger(__name__)

_TITLES = {
    "grad_norm": "The gradient's norm",
    "loss": "The loss",
    "ratio": "The largest probability ratio",
    "kl": "The KL divergence from the policy before the update",
}
_LOSSES = ("actor/pg_loss", "critic/vf_loss", "train/loss")
_RATIO, _KL = "actor/ratio_max", "actor/ppo_kl"
_REMEDY = "Lower the learning rate, or check the last samples and rewards for values out of range."
_REPLICAS_REMEDY = (
    "Check the devices and their memory (ECC errors), and code of your own that changes weights on some ranks only;"
    " then return to an earlier checkpoint."
)
_MOST_WARNINGS = 3
_DIGEST = "=8sq"


class StepGuards:
    """Decides whether an optimizer step is taken: on all ranks alike, from the numbers of all ranks.

    guards = StepGuards(config.actor.guards, ranks)
    if guards.admit(step, norm, metrics):
        ...
    """

    def __init__(self, guards: Guards, ranks: Ranks) -> None:
        self._guards = guards
        self._ranks = ranks
        self._limits = {name: getattr(guards, name) for name in _TITLES if getattr(guards, name).above is not None}
        self._skips = GuardAction.skip in {guards.non_finite, *(limit.action for limit in self._limits.values())}
        self._warnings = 0

    def admit(self, step: int, norm: float, metrics: Metrics) -> bool:
        """Whether the step is taken; adds `guards/*` to this rank's metrics. Raises `NumericError` for a fault."""
        numbers = {"grad_norm": norm} | self._over_ranks(metrics)
        verdict: tuple[GuardAction, str, str] | None = None
        bad = next((name for name, number in numbers.items() if not math.isfinite(number)), None)
        exceeded = [name for name, limit in self._limits.items() if abs(numbers.get(name, 0.0)) > limit.above]
        if bad is not None:
            verdict = self._guards.non_finite, f"{_TITLES[bad]} is {numbers[bad]}", "non_finite"
        elif exceeded:
            bad = max(exceeded, key=lambda name: [*GuardAction].index(self._limits[name].action))
            limit = self._limits[bad]
            verdict = limit.action, f"{_TITLES[bad]} is {numbers[bad]:g}, above {limit.above:g}", bad
        if verdict is not None:
            action, found, key = verdict
            self._act(action, f"{found} at optimizer step {step}", key)
        is_skipped = verdict is not None and verdict[0] is GuardAction.skip
        if self._limits:
            metrics["guards/exceeded"] = mean(float(bool(exceeded)))
        if self._skips:
            metrics["guards/skipped_updates"] = mean(float(is_skipped))
        return not is_skipped

    def compare_replicas(self, shards: Iterable[WeightShard], step: int) -> Metrics:
        """`guards/replicas_differ`, if the comparison is due before this step. Raises `NumericError` for a fault."""
        every = self._guards.replicas_every
        if not every or step % every:
            return {}
        names = differing(shards, self._ranks)
        if self._ranks.maximum(len(names), *self._ranks.mesh.sizes):
            where = f"the weight '{names[0]}'" if names else "a weight of other ranks"
            more = f" and {len(names) - 1} others" if len(names) > 1 else ""
            found = f"Data-parallel replicas hold different values of {where}{more} before optimizer step {step}"
            if self._guards.replicas is GuardAction.fault:
                raise NumericError(f"{found}.", remedy=_REPLICAS_REMEDY)
            self._warn(f"{found}.", is_shown=bool(names))
            return {"guards/replicas_differ": maximum(1.0)}
        return {"guards/replicas_differ": maximum(0.0)}

    def _over_ranks(self, metrics: Metrics) -> dict[str, float]:
        """The numbers of the whole minibatch, the same on all ranks."""
        loss = next((metrics[name].value for name in _LOSSES if name in metrics), 0.0)
        kl, ratio = metrics.get(_KL, mean(0.0, 0.0)), metrics.get(_RATIO, maximum(0.0))
        own = pack("=4d", loss, kl.value * kl.weight, kl.weight, ratio.value)
        parts = [own]
        if self._ranks.mesh.size > 1:
            gathered = all_gather_bytes(own, None)
            parts = [gathered[rank] for rank in self._ranks.mesh.subgroups(("data",))[0]]
        numbers = [numbers for part in parts for numbers in iter_unpack("=4d", part)]
        losses, kls, weights, ratios = zip(*numbers, strict=True)
        largest = math.nan if any(map(math.isnan, ratios)) else max(ratios)
        return {"loss": sum(losses), "kl": sum(kls) / (sum(weights) or 1.0), "ratio": largest}

    def _act(self, action: GuardAction, found: str, key: str) -> None:
        if action is GuardAction.fault:
            raise NumericError(f"{found}.", remedy=_REMEDY)
        does = "the step is not taken" if action is GuardAction.skip else "the step is taken"
        self._warn(f"{found}: {does} (guards.{key}).", is_shown=self._ranks.rank == 0)

    def _warn(self, message: str, *, is_shown: bool) -> None:
        self._warnings += 1
        if is_shown and self._warnings <= _MOST_WARNINGS:
            last = (
                " Further ones are only counted, in the metrics guards/*." if self._warnings == _MOST_WARNINGS else ""
            )
            logger.warning("%s%s", message, last)


def differing(shards: Iterable[WeightShard], ranks: Ranks) -> list[str]:
    """The names of weights of which two ranks along `data` hold the same part with different bits."""
    held, message = dict[bytes, str](), b""
    for shard in shards:
        key = hashlib.blake2b(f"{shard.name}{shard.layout.box}".encode(), digest_size=8).digest()
        held[key] = shard.name
        message += pack(_DIGEST, key, int(checksum(shard.tensor.detach())))
    found: dict[bytes, int] = {}
    names = []
    for part in all_gather_bytes(message, ranks.group("data")):
        for key, number in iter_unpack(_DIGEST, part):
            if found.setdefault(key, number) != number and key in held:
                names.append(held[key])
    return list(dict.fromkeys(names))
