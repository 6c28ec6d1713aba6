"""Prompts that were drawn from the stream and not trained on yet, each with its place in the stream."""

from collections.abc import Iterable, Mapping, Sequence

from hybridflow.batch import Batch
from hybridflow.dataflows.run import Loader
from hybridflow.dataflows.saved_batch import SavedState


class DrawnPrompts:
    """The prompts of the groups of a queue, by `uid`.

    uids = prompts.draw()
    prompts.of(uids[:2])  # a batch of two rows
    prompts.forget(uids[0])
    """

    def __init__(self, stream: Loader) -> None:
        self.batch_size = 0
        """Prompts that are drawn together, once some were."""

        self._stream = stream
        self._rows: dict[int, Batch] = {}
        self._positions: dict[int, Mapping[str, int]] = {}
        """The state of the stream before the batch with this prompt was drawn."""

    def draw(self, uids: Iterable[int] | None = None) -> list[int]:
        """Draws a batch, and keeps some or all of its prompts; returns their `uid`s."""
        position, prompts = self._stream.state(), self._stream.next()
        row_of = {uid: row for row, uid in enumerate(prompts.row("uid").tolist())}
        kept, self.batch_size = [*(row_of if uids is None else uids)], len(prompts)
        for uid in kept:
            self._rows[uid], self._positions[uid] = prompts.slice(row_of[uid], row_of[uid] + 1), position
        return kept

    def of(self, uids: Sequence[int]) -> Batch:
        """The prompts [G] of some groups."""
        return Batch.concat([self._rows[uid] for uid in uids])

    def forget(self, uid: int) -> None:
        """Removes the prompt of a group that was trained on or discarded."""
        del self._rows[uid], self._positions[uid]

    def clear(self) -> None:
        """Removes all prompts."""
        self._rows.clear()
        self._positions.clear()

    def state(self, uids: Iterable[int]) -> list[SavedState]:
        """The places of groups in the stream."""
        draws: list[SavedState] = []
        for uid in uids:
            position = dict(self._positions[uid])
            if not draws or draws[-1]["position"] != position:
                draws.append({"position": position, "uids": []})
            draws[-1]["uids"].append(uid)
        return draws

    def restore(self, draws: Iterable[SavedState]) -> list[int]:
        """Draws what `state` returned, or whole batches by their `position` alone; returns all `uid`s.

        The stream remains where it is.
        """
        now, found = self._stream.state(), list[int]()
        for draw in draws:
            self._stream.restore(draw["position"])
            found += self.draw(draw.get("uids"))
        self._stream.restore(now)
        return found
