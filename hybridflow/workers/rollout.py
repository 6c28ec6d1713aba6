"""The rollout in a pool of its own: weights come from the actor's processes."""

from hybridflow.batch import Batch
from hybridflow.controller.protocols import BROADCAST, GENERATION
from hybridflow.controller.signed_store import StoreAddress
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.resharding.resharder import Resharder, joint_group
from hybridflow.workers.generation import Generation, RolloutSetup


class RolloutWorker(Worker):
    """One rank of a rollout that shares no device with the actor.

    `receive_weights` is called together with the actor's `publish_weights`; before the first one, and after one that
    failed, `generate` refuses.
    """

    def __init__(self, context: WorkerContext, *, setup: RolloutSetup) -> None:
        super().__init__(context)
        context.ranks()  # all ranks meet before vLLM makes its groups
        self._setup = setup
        self._generation = Generation(context, setup)
        self._resharder: Resharder | None = None

    @transfer(BROADCAST, changes=False)
    def is_ready(self) -> bool:
        """An answer comes once the engine has started, which may take longer than a transfer may."""
        return True

    @transfer(BROADCAST)
    def join_actor(self, address: StoreAddress, sizes: tuple[int, int]) -> None:
        """Meets the actor's ranks at a store of theirs; `sizes` are the ranks of the actor and of the rollout."""
        num_sources, num_destinations = sizes
        transfer_config = self._setup.rollout.transfer
        group = joint_group(
            self.context.rendezvous.link(address),
            num_sources + self.context.rank,
            num_sources + num_destinations,
            timeout_seconds=transfer_config.timeout_seconds,
            device=self.context.device,
        )
        slots = self._generation.engine.weight_slots()
        self._resharder = Resharder(None, slots, group=group, node=self.context.node, transfer=transfer_config)

    @transfer(BROADCAST, changes=False)
    def receive_weights(self, version: int) -> None:
        """Takes the weights that the actor sends."""
        assert self._resharder is not None, "the rollout has not joined the actor"
        self._generation.engine.weights_changing()
        self._resharder.transfer(version)
        self._generation.engine.weights_changed(version=version)

    @transfer(
        GENERATION,
        provides=("response_ids", "response_mask", "rollout_logprobs", "weight_version", "truncated"),
        changes=False,
    )
    def generate(self, prompts: Batch, purpose: str = "train") -> Batch:
        """One response per prompt. `purpose` chooses how tokens are drawn: train, eval or greedy."""
        return self._generation.generate(prompts, purpose)
