"""Rules of the section `data`, checked before any file is read."""

import math

from hybridflow.config.data import Data
from hybridflow.errors import ConfigError


def check_data(data: Data) -> None:
    """Raises `ConfigError` for the first rule that is broken."""
    _check_mixture(data)
    if data.curriculum_steps and data.difficulty_key is None:
        raise ConfigError(
            f"data.curriculum_steps={data.curriculum_steps}, but no column says how hard a row is.",
            remedy="Name a column of numbers: data.difficulty_key=...",
        )
    if data.curriculum_steps and data.mixture:
        raise ConfigError(
            "data.curriculum_steps and data.mixture both say which rows come when.",
            remedy="Leave one out: with data.difficulty_key alone, each file of a mixture goes from easy to hard.",
        )


def _check_mixture(data: Data) -> None:
    mixture = data.mixture
    if not mixture:
        return
    if len(mixture) != len(data.train_files):
        raise ConfigError(
            f"data.mixture has {len(mixture)} numbers for {len(data.train_files)} data.train_files.",
            remedy="Give one number per file, or leave it empty to lay the files end to end.",
        )
    if not all(math.isfinite(share) and share > 0 for share in mixture):
        raise ConfigError(
            f"data.mixture={mixture} has a share that is not above 0.",
            remedy="Give shares such as [0.7,0.3], and leave a file out that is not to be drawn from.",
        )
