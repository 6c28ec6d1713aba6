"""The weights that lie alike, found from what every rank holds and wants."""

import difflib
from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import are_disjoint, box_text, volume
from hybridflow.parallel.layout import Box
from hybridflow.resharding.holdings import Holding
from hybridflow.resharding.routes import Located, WeightClass

Ranked = tuple[tuple[Holding, ...], ...]
"""Holdings of each rank."""

_Kind = tuple[tuple[int, ...], int]
"""Shape and bytes an element."""

_Entry = tuple[int, Box]
"""A number of a pattern (ranks with equal holdings have one), and a box."""


def classify(sources: Ranked, destinations: Ranked) -> list[WeightClass]:
    """The wanted weights by how they lie, large ones first; weights that nobody wants are left out."""
    held, held_ranks = _by_name(sources, "holds")
    wanted, wanted_ranks = _by_name(destinations, "needs")
    alike: dict[tuple, list[tuple[int, str]]] = defaultdict(list)
    for place, (name, (shape, itemsize, entries)) in enumerate(wanted.items()):
        found = held.get(name)
        if found is None:
            _refuse_unheld(name, sources)
        if found[:2] != (shape, itemsize):
            _refuse_disagreement(name, found[:2], (shape, itemsize), "the rollout needs")
        alike[shape, itemsize, tuple(found[2]), tuple(entries)].append((place, name))
    classes = [
        WeightClass(
            names=tuple(name for _, name in members),
            places=tuple(place for place, _ in members),
            shape=shape,
            itemsize=itemsize,
            held=_located(held_entries, held_ranks),
            wanted=_located_once(members[0][1], wanted_entries, wanted_ranks),
        )
        for (shape, itemsize, held_entries, wanted_entries), members in alike.items()
    ]
    return sorted(classes, key=lambda weights: (-volume(tuple((0, size) for size in weights.shape)), weights.places))


def _by_name(ranked: Ranked, verb: str) -> tuple[dict[str, tuple[tuple[int, ...], int, list[_Entry]]], list[list[int]]]:
    """Shape, item size and entries of each weight; and the ranks of each pattern."""
    patterns: dict[tuple[Holding, ...], list[int]] = {}
    for rank, holdings in enumerate(ranked):
        patterns.setdefault(holdings, []).append(rank)
    found: dict[str, tuple[tuple[int, ...], int, list[_Entry]]] = {}
    for number, (holdings, ranks) in enumerate(patterns.items()):
        for name, shape, box, itemsize in holdings:
            known = found.get(name)
            if known is None:
                found[name] = (shape, itemsize, [(number, box)])
            elif known[0] == shape and known[1] == itemsize:
                known[2].append((number, box))
            else:
                _refuse_disagreement(name, known[:2], (shape, itemsize), f"rank {ranks[0]} {verb}")
    return found, list(patterns.values())


def _located(entries: Sequence[_Entry], ranks_of: Sequence[list[int]]) -> Located:
    """The boxes that are not empty, in order, each with the ranks of its patterns."""
    ranks: dict[Box, set[int]] = defaultdict(set)
    for number, box in entries:
        if volume(box):
            ranks[box].update(ranks_of[number])
    return tuple((box, tuple(sorted(ranks[box]))) for box in sorted(ranks))


def _located_once(name: str, entries: Sequence[_Entry], ranks_of: Sequence[list[int]]) -> Located:
    """The same, where no rank may name an index twice."""
    boxes: dict[int, list[Box]] = defaultdict(list)
    for number, box in entries:
        boxes[number].append(box)
    for number, own in boxes.items():
        if len(own) > 1 and not are_disjoint(own):
            raise EngineError(
                f"Rank {ranks_of[number][0]} needs parts of '{name}' twice: {', '.join(map(box_text, own))}.",
                remedy="Name each part once in weight_slots(); a tied weight only under the embedding's name.",
            )
    return _located(entries, ranks_of)


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
