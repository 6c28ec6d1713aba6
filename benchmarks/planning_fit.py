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
from hybridflow.mapping.fitting import descended

USUAL = (0.5, 0.5, 60e-6)
USUAL_WEIGHT = 0.05
"""A constant twice the usual one counts as much as a row with an error of a sixth."""

STARTS = (USUAL, (0.6, 0.7, 30e-6), (0.3, 0.5, 120e-6))
LOWEST, HIGHEST = (0.1, 0.1, 1e-6), (0.8, 0.9, 1e-3)
"""Bounds of the constants (assumed): fractions of the peaks of matrix products and of memory, and seconds."""

FACTORS = (0.3, 0.005)


def fitted(cases: Sequence[Case]) -> Efficiency:
    """The constants with the least squared error on these rows."""

    def error(constants: Sequence[float]) -> float:
        return _squared_error(constants, cases)

    found = [descended(start, error, lowest=LOWEST, highest=HIGHEST, factors=FACTORS) for start in STARTS]
    return Efficiency(*min(found, key=error))


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


def _squared_error(constants: Sequence[float], cases: Sequence[Case]) -> float:
    efficiency = Efficiency(*constants)
    drawn = sum(math.log(constant / usual) ** 2 for constant, usual in zip(constants, USUAL, strict=True))
    return USUAL_WEIGHT * drawn + sum(math.log(case.predict(efficiency) / case.published) ** 2 for case in cases)


if __name__ == "__main__":
    main()
