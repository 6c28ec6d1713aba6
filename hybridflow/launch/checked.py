"""The configuration of a run, composed and checked by all rules that need neither torch nor the models."""

from collections.abc import Sequence
from pathlib import Path

from hybridflow.errors import STRICT, Problems
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.overrides import Typed
from hybridflow.launch.rules.packages import package_problems
from hybridflow.launch.rules.parallelism import parallelism_problems


def checked_composition(
    overrides: Sequence[str] | Typed, *, config_name: str, config_dir: Path | None = None, problems: Problems = STRICT
) -> tuple[Composed, bool]:
    """The configuration of a run that will be prepared, and whether its roles fit on its devices.

    Every run is composed by this function; a drawing, which needs no devices, by `compose_run`.
    """
    composed = compose_run(overrides, config_name=config_name, config_dir=config_dir, problems=problems)
    has_layout = problems.check([parallelism_problems], composed.config)
    problems.check([package_problems], composed.config)
    return composed, has_layout
