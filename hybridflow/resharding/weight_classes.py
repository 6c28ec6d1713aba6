"""Weights grouped by layout: equal layers of a model are planned together."""

import difflib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import Box, are_disjoint, box_text, volume
from hybridflow.resharding.holdings import Kind, Ranked, Roster

Located = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes, each with the ranks it is on."""

_Column = tuple[int, int]
"""The index of a layout, and a slot of its roster: the location of a weight on all ranks of the layout."""


@dataclass(frozen=True)
class WeightClass:
    """Weights with the same shape and the same boxes on the same ranks."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    """Index of each name in the order of all weights."""
    shape: tuple[int, ...]
    itemsize: int
    held: Located
    wanted: Located


class _Layout(NamedTuple):
    """Ranks with the same roster, and one pattern for each set of boxes among them."""

    boxes: list[tuple[Box, ...]]
    """Boxes of all slots, per pattern."""

    ranks: list[list[int]]
    """Ranks per pattern."""


def classify(sources: Ranked, destinations: Ranked) -> list[WeightClass]:
    """Groups the wanted weights by layout, large ones first. Weights that no rank wants are left out."""
    held, held_layouts = _by_name(sources, "holds")
    wanted, wanted_layouts = _by_name(destinations, "needs")
    same: dict[tuple[Kind, tuple[_Column, ...], tuple[_Column, ...]], list[tuple[int, str]]] = defaultdict(list)
    for place, (name, (kind, columns)) in enumerate(wanted.items()):
        if name not in held:
            _refuse_unheld(name, sources)
        held_kind, held_columns = held[name]
        if held_kind != kind:
            _refuse_disagreement(name, held_kind, kind, "the rollout needs")
        same[kind, tuple(held_columns), tuple(columns)].append((place, name))
    classes = [
        WeightClass(
            names=tuple(name for _, name in members),
            places=tuple(place for place, _ in members),
            shape=shape,
            itemsize=itemsize,
            held=_located(held_columns, held_layouts),
            wanted=_located_once(members[0][1], columns, wanted_layouts),
        )
        for ((shape, itemsize), held_columns, columns), members in same.items()
    ]
    filled = (weights for weights in classes if weights.wanted)
    return sorted(filled, key=lambda weights: (-math.prod(weights.shape), weights.places))


def _by_name(ranked: Ranked, verb: str) -> tuple[dict[str, tuple[Kind, list[_Column]]], list[_Layout]]:
    """The kind and the columns of each weight. Iterates over slots: a thousand ranks have millions of holdings."""
    patterns: dict[Roster, dict[tuple[Box, ...], list[int]]] = {}
    for rank, own in enumerate(ranked):
        if own.roster.names:
            patterns.setdefault(own.roster, {}).setdefault(own.boxes, []).append(rank)
    layouts = [_Layout(list(of_boxes), list(of_boxes.values())) for of_boxes in patterns.values()]
    found: dict[str, tuple[Kind, list[_Column]]] = {}
    for number, roster in enumerate(patterns):
        for name, slot in zip(roster.names, roster.slots, strict=True):
            kind = roster.kinds[slot]
            known, columns = found.setdefault(name, (kind, []))
            if known != kind:
                _refuse_disagreement(name, known, kind, f"rank {layouts[number].ranks[0][0]} {verb}")
            columns.append((number, slot))
    return found, layouts


def _located(columns: Iterable[_Column], layouts: Sequence[_Layout]) -> Located:
    """The nonempty boxes, sorted, each with its ranks."""
    ranks: dict[Box, set[int]] = defaultdict(set)
    for number, slot in columns:
        for boxes, own in zip(layouts[number].boxes, layouts[number].ranks, strict=True):
            if volume(boxes[slot]):
                ranks[boxes[slot]].update(own)
    return tuple((box, tuple(sorted(ranks[box]))) for box in sorted(ranks))


def _located_once(name: str, columns: Sequence[_Column], layouts: Sequence[_Layout]) -> Located:
    """Like `_located`, but raises an error if the boxes of a rank overlap."""
    by_layout: dict[int, list[int]] = defaultdict(list)
    for number, slot in columns:
        by_layout[number].append(slot)
    for number, slots in by_layout.items():
        if len(slots) == 1:
            continue
        for boxes, ranks in zip(layouts[number].boxes, layouts[number].ranks, strict=True):
            own = [boxes[slot] for slot in slots]
            if not are_disjoint(own):
                raise EngineError(
                    f"Rank {ranks[0]} needs parts of '{name}' twice: {', '.join(map(box_text, own))}.",
                    remedy="Name each part once in weight_slots(); a tied weight only under the embedding's name.",
                )
    return _located(columns, layouts)


def _refuse_unheld(name: str, sources: Ranked) -> NoReturn:
    names = {name for holdings in sources for name in holdings.roster.names}
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" The nearest name is '{close[0]}'." if close else ""
    raise EngineError(
        f"The rollout needs the weight '{name}', but no rank of the trained model holds it.{hint}",
        remedy="Load both engines from the same model.path.",
    )


def _refuse_disagreement(name: str, first: Kind, second: Kind, where: str) -> NoReturn:
    first_text, second_text = (f"{list(shape)} of {itemsize} bytes per element" for shape, itemsize in (first, second))
    raise EngineError(
        f"The weight '{name}' is {first_text} on one side, and {where} it as {second_text}.",
        remedy="Load both engines from the same model.path, with the same model.dtype.",
    )
