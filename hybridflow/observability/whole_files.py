"""Files that are replaced as a whole."""

from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> Path:
    """Replaces a file, or creates it, so that nobody reads half of it; returns its path.

    A process that is killed here leaves the earlier content, and so does an error, such as that of a full disk. Text is
    written as UTF-8; what cannot be encoded becomes a question mark.
    """
    aside = path.with_name(f"{path.name}.partial")
    try:
        aside.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
        return aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
