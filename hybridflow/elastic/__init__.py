"""A run outlives its machines: whole checkpoints, and how a run goes on from them. Read `checkpoint.py` first.

    runs/<experiment>/checkpoints/step_40/
        manifest.json      every file with its size and SHA-256; written last, so what lacks it is not a checkpoint
        driver.json        counters, data position and random states of the driver
        actor/huggingface/ a model directory that `transformers` loads
        actor/...          what each role saved itself

Nothing half-written is ever visible: `storage` writes beside the final name, flushes, and renames.
"""

from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.compatibility import check_compatible
from hybridflow.elastic.recovery import resolve_resume, set_aside

__all__ = ["Checkpoint", "CheckpointStore", "check_compatible", "resolve_resume", "set_aside"]
