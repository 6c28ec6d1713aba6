"""Ties the actor to a rollout in another pool: publishing weights then sends and receives them."""

from typing import cast

from hybridflow.controller.futures import Future, wait
from hybridflow.controller.worker_group import WorkerGroup


def link_weights(actor: WorkerGroup, rollout: WorkerGroup) -> None:
    """Lets the ranks of both groups meet, and `actor.publish_weights` call `rollout.receive_weights` beside it."""
    wait(rollout.is_ready())
    addresses = cast(Future, actor.serve_weights()).result()
    address = addresses[0] if isinstance(addresses, list) else addresses
    sizes = (actor.world_size, rollout.world_size)
    wait(actor.join_rollout(address, sizes), rollout.join_actor(address, sizes))
    actor.link("publish_weights", rollout, "receive_weights")
