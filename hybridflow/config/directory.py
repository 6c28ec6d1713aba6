"""The directory of the package's YAML files."""

from importlib.resources import files
from pathlib import Path

from hybridflow.errors import ConfigError


def config_directory() -> Path:
    """The directory `trainer_configs/`: in the package if installed from a wheel, next to it in a checkout."""
    package = Path(str(files("hybridflow")))
    for candidate in (package / "trainer_configs", package.parent / "trainer_configs"):
        if (candidate / "ppo.yaml").is_file():
            return candidate
    raise ConfigError(
        f"There is no trainer_configs/ in or next to {package}.",
        remedy="Reinstall hybridflow; in a checkout: pip install .",
    )
