"""The file with a line for each fault that a run has survived, or that ended it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.observability.jsonlines import Json, JsonLinesFile

logger = logging.getLogger(__name__)


def append_faults(ledger: Path, faults: Sequence[Mapping[str, Json]], outcome: Mapping[str, Json]) -> None:
    """Appends faults, each with what became of it; logs a warning if the file cannot be written."""
    if not faults:
        return
    try:
        file = JsonLinesFile(ledger)
        for fault in faults:
            file.append({**fault, **outcome})
        file.close()
    except OSError as error:  # the fault itself may be a full disk, or a run directory that no longer exists
        logger.warning("file=%s cannot be written: %s", ledger, error)
