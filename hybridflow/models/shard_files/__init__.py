"""Reads and writes Hugging Face directories in shards, so that no rank holds a whole model. Read `reading.py` first."""

from hybridflow.models.shard_files.reading import read_into
from hybridflow.models.shard_files.writing import save_directory

__all__ = ["read_into", "save_directory"]
