"""The data protocol: data that crosses process boundaries. Read `columns.py`, then `batch.py`."""

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged

__all__ = ["Batch", "Ragged"]
