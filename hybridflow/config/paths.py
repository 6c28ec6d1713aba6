"""Paths as users write them, refused in our words where no file system could hold them."""

from pathlib import Path

from hybridflow.errors import ConfigError

_LONGEST_BYTES = 4095
_LONGEST_NAME_BYTES = 255


def user_path(text: str, *, key: str = "") -> Path:
    """The path that a user wrote, with `~` expanded. It need not exist.

    Raises `ConfigError` for an unknown user after `~`, a NUL character, and names or paths longer than Linux allows.
    `key` is the setting that holds the path, for errors.
    """
    shown = f"{key}={_shown(text)}" if key else f"'{_shown(text)}'"
    if "\0" in text:
        raise ConfigError(f"{shown} contains a NUL character.", remedy="Paths are text without control characters.")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{shown}: there is no user '{Path(text).parts[0].removeprefix('~')}' here.",
            remedy="Write the path in full; a directory whose name begins with ~ is written ./~name.",
        ) from error
    size = len(str(path).encode(errors="surrogateescape"))
    longest = max((len(part.encode(errors="surrogateescape")) for part in path.parts), default=0)
    if size > _LONGEST_BYTES or longest > _LONGEST_NAME_BYTES:
        raise ConfigError(
            f"{shown} is too long for a path: it has {size} bytes, and {longest} in one name.",
            remedy=f"Use at most {_LONGEST_NAME_BYTES} bytes between slashes, and {_LONGEST_BYTES} in all.",
        )
    return path


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"
