"""Reads and writes Hugging Face directories in shards, so that no rank holds a whole model. Read `reading.py` first."""

from hybridflow.models.shard_files.reading import read_into
from hybridflow.models.shard_files.writing import PlannedDirectory, plan_directory, save_directory

__all__ = ["PlannedDirectory", "plan_directory", "read_into", "save_directory"]
