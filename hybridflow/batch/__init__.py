"""The data protocol: what crosses a process boundary. Read `columns.py`, then `batch.py`."""

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged

__all__ = ["Batch", "Ragged"]
