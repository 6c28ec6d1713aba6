"""The id under which a tracking service knows a run, kept in the run directory so that a resumed run continues it."""

from pathlib import Path


def stored_run_id(path: Path, *, is_resumed: bool) -> str | None:
    """The id a resumed run had; None for a new run or when none was kept."""
    return path.read_text(encoding="utf-8").strip() or None if is_resumed and path.exists() else None
