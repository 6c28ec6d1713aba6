"""Checkpoints of a run, and how a run stops and resumes. Read `checkpoint.py` first.

    runs/<experiment>/checkpoints/step_40/
        manifest.json      every file with its size and SHA-256; written last, so that it marks a checkpoint
        driver.json        counters, data position and random states of the driver
        actor/huggingface/ a model directory that `transformers` can load
        actor/...          the rest of each role's state

Nothing half-written is ever visible: `storage` writes to a temporary directory, flushes it, and renames it.
"""

from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.compatibility import check_compatible
from hybridflow.elastic.resuming import resolve_resume, set_aside

__all__ = ["Checkpoint", "CheckpointStore", "check_compatible", "resolve_resume", "set_aside"]
