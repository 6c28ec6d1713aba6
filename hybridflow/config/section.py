"""What every section of the configuration shares: it can be sealed."""

from hybridflow.errors import ConfigError


class Section:
    """Base of the configuration's dataclasses; once sealed, assigning to a field raises `ConfigError`."""

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_sealed"):
            raise ConfigError(
                f"The configuration is sealed: {type(self).__name__}.{name} cannot become {value!r}.",
                remedy="Set it on the command line or in a file; compute per-rank sizes with config/derived.py.",
            )
        object.__setattr__(self, name, value)
