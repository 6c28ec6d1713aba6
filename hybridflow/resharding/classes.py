"""The weights that lie alike, found from what every rank holds and wants."""

import difflib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import are_disjoint, box_text, volume
from hybridflow.parallel.layout import Box
from hybridflow.resharding.holdings import Holding
from hybridflow.resharding.routes import Located, WeightClass

Ranked = tuple[tuple[Holding, ...], ...]
"""Holdings of each rank."""

_Kind = tuple[tuple[int, ...], int]
"""Shape and bytes an element."""

_Column = tuple[int, tuple[Box, ...]]
"""The number of a layout, and for each of its patterns the box of one weight."""


class _Layout(NamedTuple):
    """Ranks that name the same weights in the same order. Ranks with the same boxes too are one pattern."""

    boxes: list[tuple[Box, ...]]
    """Of all weights; an entry a pattern."""

    ranks: list[list[int]]
    """An entry a pattern."""


def classify(sources: Ranked, destinations: Ranked) -> list[WeightClass]:
    """The wanted weights by how they lie, large ones first; weights that nobody wants are left out."""
    held, held_layouts = _by_name(sources, "holds")
    wanted, wanted_layouts = _by_name(destinations, "needs")
    alike: dict[tuple[_Kind, tuple[_Column, ...], tuple[_Column, ...]], list[tuple[int, str]]] = defaultdict(list)
    for place, (name, (kind, columns)) in enumerate(wanted.items()):
        if name not in held:
            _refuse_unheld(name, sources)
        held_kind, held_columns = held[name]
        if held_kind != kind:
            _refuse_disagreement(name, held_kind, kind, "the rollout needs")
        alike[kind, tuple(held_columns), tuple(columns)].append((place, name))
    classes = [
        WeightClass(
            names=tuple(name for _, name in members),
            places=tuple(place for place, _ in members),
            shape=shape,
            itemsize=itemsize,
            held=_located(held_columns, held_layouts),
            wanted=_located_once(members[0][1], columns, wanted_layouts),
        )
        for ((shape, itemsize), held_columns, columns), members in alike.items()
    ]
    filled = (weights for weights in classes if weights.wanted)
    return sorted(filled, key=lambda weights: (-math.prod(weights.shape), weights.places))


def _by_name(ranked: Ranked, verb: str) -> tuple[dict[str, tuple[_Kind, list[_Column]]], list[_Layout]]:
    """The kind and the columns of each weight, by columns rather than by holdings: a thousand ranks have millions."""
    patterns: dict[tuple[Holding, ...], list[int]] = {}
    for rank, holdings in enumerate(ranked):
        patterns.setdefault(holdings, []).append(rank)
    layouts: dict[tuple[tuple[str, ...], tuple[_Kind, ...]], _Layout] = {}
    for holdings, ranks in patterns.items():
        if holdings:
            names, shapes, boxes, itemsizes = zip(*holdings, strict=True)
            layout = layouts.setdefault((names, tuple(zip(shapes, itemsizes, strict=True))), _Layout([], []))
            layout.boxes.append(boxes)
            layout.ranks.append(ranks)
    found: dict[str, tuple[_Kind, list[_Column]]] = {}
    for number, ((names, kinds), layout) in enumerate(layouts.items()):
        for name, kind, boxes in zip(names, kinds, zip(*layout.boxes, strict=True), strict=True):
            known, columns = found.setdefault(name, (kind, []))
            if known != kind:
                _refuse_disagreement(name, known, kind, f"rank {layout.ranks[0][0]} {verb}")
            columns.append((number, boxes))
    return found, list(layouts.values())


def _located(columns: Iterable[_Column], layouts: Sequence[_Layout]) -> Located:
    """The boxes that are not empty, in order, each with its ranks."""
    ranks: dict[Box, set[int]] = defaultdict(set)
    for number, boxes in columns:
        for box, own in zip(boxes, layouts[number].ranks, strict=True):
            if volume(box):
                ranks[box].update(own)
    return tuple((box, tuple(sorted(ranks[box]))) for box in sorted(ranks))


def _located_once(name: str, columns: Sequence[_Column], layouts: Sequence[_Layout]) -> Located:
    """The same, where no rank may name an index twice."""
    by_layout: dict[int, list[tuple[Box, ...]]] = defaultdict(list)
    for number, boxes in columns:
        by_layout[number].append(boxes)
    for number, several in by_layout.items():
        if len(several) == 1:
            continue
        for own, ranks in zip(zip(*several, strict=True), layouts[number].ranks, strict=True):
            if not are_disjoint(own):
                raise EngineError(
                    f"Rank {ranks[0]} needs parts of '{name}' twice: {', '.join(map(box_text, own))}.",
                    remedy="Name each part once in weight_slots(); a tied weight only under the embedding's name.",
                )
    return _located(columns, layouts)


def _refuse_unheld(name: str, sources: Ranked) -> NoReturn:
    names = {holding.name for holdings in sources for holding in holdings}
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" The nearest name is '{close[0]}'." if close else ""
    raise EngineError(
        f"The rollout needs the weight '{name}', and no rank of the trained model holds it.{hint}",
        remedy="Load both engines from the same model.path.",
    )


def _refuse_disagreement(name: str, first: _Kind, second: _Kind, where: str) -> NoReturn:
    raise EngineError(
        f"The weight '{name}' is {_kind_text(first)} on one side, and {where} it as {_kind_text(second)}.",
        remedy="Load both engines from the same model.path, in the same number format (model.dtype).",
    )


def _kind_text(kind: _Kind) -> str:
    shape, itemsize = kind
    return f"{list(shape)} of {itemsize} bytes an element"
