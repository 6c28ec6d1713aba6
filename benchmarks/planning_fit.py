"""Fits the three constants of each device on the odd rows of published times, and prints them for assets/devices.yaml.

    python benchmarks/planning_fit.py

Least squares of the logarithm of predicted by published seconds, by coordinate search. Constants are drawn weakly
towards usual ones, so that a constant that few rows depend on stays plausible.
"""

import math
import sys
from collections.abc import Sequence

from benchmarks.planning_times import Case, all_cases
from hybridflow.mapping.devices import Efficiency

USUAL = (0.5, 0.5, 60e-6)
USUAL_WEIGHT = 0.05
"""A constant twice the usual one counts as much as a row with an error of a sixth."""

STARTS = (USUAL, (0.6, 0.7, 30e-6), (0.3, 0.5, 120e-6))
LOWEST, HIGHEST = (0.1, 0.1, 1e-6), (0.8, 0.9, 1e-3)
"""The largest matrix products reach about four fifths of a device's peak, and copies nine tenths."""

FIRST_FACTOR, LAST_FACTOR = 0.3, 0.005


def fitted(cases: Sequence[Case]) -> Efficiency:
    """The constants with the least squared error on these rows."""
    found = [_descended(list(start), cases) for start in STARTS]
    return Efficiency(*min(found, key=lambda constants: _squared_error(constants, cases)))


def main() -> None:
    """Prints the constants of each device."""
    cases = [case for case in all_cases() if case.is_fitted]
    for device in dict.fromkeys(case.device for case in cases):
        own = [case for case in cases if case.device == device]
        found = fitted(own)
        sys.stdout.write(
            f"{device}:  # {len(own)} rows\n  matrix_efficiency: {found.matrix:.3f}\n"
            f"  bandwidth_efficiency: {found.bandwidth:.3f}\n  sync_seconds: {found.sync_seconds:.3g}\n"
        )


def _descended(constants: list[float], cases: Sequence[Case]) -> list[float]:
    """The end of a coordinate search: each constant is multiplied by factors that become smaller."""
    error, factor = _squared_error(constants, cases), FIRST_FACTOR
    while factor > LAST_FACTOR:
        has_improved = False
        for place in range(3):
            for scale in (1 + factor, 1 / (1 + factor)):
                changed = list(constants)
                changed[place] = min(max(changed[place] * scale, LOWEST[place]), HIGHEST[place])
                if (smaller := _squared_error(changed, cases)) < error - 1e-9:
                    constants, error, has_improved = changed, smaller, True
        factor = factor if has_improved else factor / 2
    return constants


def _squared_error(constants: Sequence[float], cases: Sequence[Case]) -> float:
    efficiency = Efficiency(*constants)
    drawn = sum(math.log(constant / usual) ** 2 for constant, usual in zip(constants, USUAL, strict=True))
    return USUAL_WEIGHT * drawn + sum(math.log(case.predict(efficiency) / case.published) ** 2 for case in cases)


if __name__ == "__main__":
    main()
