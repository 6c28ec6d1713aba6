"""Ragged token columns: the concatenated values of all rows, and the offset of each row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.errors import BatchError

LONG_ROW_TOKENS = 256
"""Rows longer than this on average are selected slice by slice: 17 times faster at 2,048 tokens."""


@dataclass(frozen=True)
class Ragged:
    """B rows of different lengths: concatenated `values` [N, ...], and `offsets` [B + 1] on the CPU (int64)."""

    values: Tensor
    offsets: Tensor

    @staticmethod
    def from_rows(rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype | None = None) -> "Ragged":
        """Concatenates rows."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return Ragged(values, offsets_of(lengths))

    @staticmethod
    def from_lengths(values: Tensor, lengths: Tensor) -> "Ragged":
        """Concatenated values of all rows, split by row lengths [B]."""
        return Ragged(values, offsets_of(lengths))

    @staticmethod
    def from_padded(padded: Tensor, lengths: Tensor) -> "Ragged":
        """The first `lengths[i]` entries of each row of a right-padded [B, R, ...] tensor."""
        keep = torch.arange(padded.shape[1]) < lengths.cpu()[:, None]
        return Ragged(padded[keep.to(padded.device)], offsets_of(lengths.cpu()))

    @staticmethod
    def concat(parts: Sequence["Ragged"]) -> "Ragged":
        """The rows of several `Ragged`, in order."""
        return Ragged(
            torch.cat([part.values for part in parts]), offsets_of(torch.cat([part.lengths for part in parts]))
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens per row, [B]."""
        return self.offsets.diff()

    def row(self, index: int) -> Tensor:
        """One row, as a view."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def rows(self) -> list[Tensor]:
        """All rows, as views."""
        return list(self.values.split(self.lengths.tolist()))

    def slice(self, start: int, stop: int) -> "Ragged":
        """Rows start..stop-1, as a view."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def select(self, index: Tensor) -> "Ragged":
        """The rows at the given positions [K], in that order, or where a boolean mask [B] is True; copied."""
        index = row_positions(index, len(self))
        lengths = self.lengths[index]
        if int(lengths.sum()) > LONG_ROW_TOKENS * len(index):
            rows = self.rows()
            return Ragged(torch.cat([rows[i] for i in index.tolist()]), offsets_of(lengths))
        return Ragged(self.values[self._positions(index, lengths).to(self.values.device)], offsets_of(lengths))

    def padded(self, fill: float | int, *, length: int | None = None) -> Tensor:
        """Right-padded [B, R]; R is the longest row or `length`."""
        lengths = self.lengths
        width = length if length is not None else int(lengths.max()) if len(lengths) else 0
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        keep = torch.arange(width) < lengths[:, None]
        out[keep.to(out.device)] = self.values
        return out

    def row_sums(self) -> Tensor:
        """The sum of each row's values, [B]."""
        row = torch.arange(len(self)).repeat_interleave(self.lengths)
        return self.values.new_zeros(len(self)).index_add(0, row, self.values)

    def spread(self, is_own: Tensor, lengths: Tensor) -> "Ragged":
        """B rows of the given lengths [B]: these rows, in order, where a mask [B] is True, and zeros elsewhere."""
        values = self.values.new_zeros(int(lengths.sum()), *self.values.shape[1:])
        values[is_own.repeat_interleave(lengths)] = self.values
        return Ragged.from_lengths(values, lengths)

    def like(self, values: Tensor) -> "Ragged":
        """Other values with the same row lengths."""
        assert len(values) == int(self.offsets[-1]), f"{len(values)} values for {int(self.offsets[-1])} tokens"
        return Ragged(values, self.offsets)

    def to(self, device: torch.device | str) -> "Ragged":
        """Values on a device; offsets stay on the CPU."""
        return Ragged(self.values.to(device), self.offsets)

    def _positions(self, index: Tensor, lengths: Tensor) -> Tensor:
        shift = self.offsets[:-1][index] - offsets_of(lengths)[:-1]
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


def offsets_of(lengths: Tensor) -> Tensor:
    """Row offsets and the end, [B + 1], from row lengths [B]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def numbers_in_rows(lengths: Tensor) -> Tensor:
    """The number of each token in its row, [N], from row lengths [B]."""
    return torch.arange(int(lengths.sum())) - offsets_of(lengths)[:-1].repeat_interleave(lengths)


def row_positions(rows: Tensor | Sequence[int] | Sequence[bool], count: int) -> Tensor:
    """Positions [K] (int64) of some rows of a batch of `count`: given as positions, or as a boolean mask [count].

    Positions may be in any order and repeat. Raises `BatchError` for a mask of another length and for floats.
    """
    chosen = torch.as_tensor(rows)
    if chosen.dtype is torch.bool:
        if chosen.shape != (count,):
            raise BatchError(
                f"A mask of shape {list(chosen.shape)} cannot choose rows of a batch of {count}.",
                remedy=f"Give one boolean per row, {count} in all, or the positions of the rows.",
            )
        return chosen.nonzero().flatten()
    if chosen.dtype.is_floating_point and chosen.numel():
        raise BatchError(
            f"Rows cannot be chosen by numbers of type {str(chosen.dtype).removeprefix('torch.')}.",
            remedy="Give integer positions, or a boolean mask such as batch.row('scores') > 0.",
        )
    return chosen.to(torch.int64)


def interleaved(left: Ragged, right: Ragged) -> Ragged:
    """Row by row, left followed by right: prompts and responses become sequences."""
    both = Ragged.concat([left, right])
    order = torch.stack([torch.arange(len(left)), torch.arange(len(left)) + len(left)], 1).flatten()
    mixed = both.select(order)
    return Ragged(mixed.values, mixed.offsets[::2].contiguous())
