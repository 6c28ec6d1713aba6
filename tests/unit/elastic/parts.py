"""What a role's workers answer of what they wrote, for tests that write it themselves."""

from pathlib import Path

from hybridflow.elastic.manifest import Parts
from hybridflow.parallel.file_records import files_below, record_files


def written_by(directory: Path, *roles: str) -> Parts:
    """Everything below the directories of these roles, as their workers would record it."""
    names = {role: [name for name in files_below(directory) if name.startswith(f"{role}/")] for role in roles}
    return {role: record_files(directory, files) for role, files in names.items()}
