"""TensorBoard event files, written without torch or TensorFlow."""

import os
import socket
import time
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.interface import TrackedRun

_ESCAPED = str.maketrans({"\\": "\\\\", "|": "\\|", "`": "\\`", "\n": "\u21b5"})
_TABLE_HEAD = "| prompt | response | answer | score |\n|---|---|---|---|\n"


class TensorBoardTracker:
    """Scalars under their own names, samples as text, in `run_dir/tensorboard`.

    `rewind` hides the records of later steps.
    """

    def __init__(self, run: TrackedRun) -> None:
        directory = run.run_dir / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        # TensorBoard's own EventFileWriter writes in a thread, whose errors nobody could catch.
        self._writer = RecordWriter((directory / name).open("xb"))
        self._write(Event(file_version="brain.Event:2"))

    def rewind(self, step: int, *, is_unlogged: bool) -> None:
        """Starts a session at the next step, which hides earlier records of that and later steps."""
        self._write(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar per metric."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Writes one markdown table per split."""
        for split in sorted({sample.split for sample in rows}):
            table = _TABLE_HEAD + "\n".join(_table_row(sample) for sample in rows if sample.split == split)
            self._write(Event(step=step, summary=Summary(value=[_text_value(f"samples/{split}", table)])))

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _table_row(sample: Sample) -> str:
    cells = (sample.prompt, sample.response, sample.answer or "", f"{sample.score:.4g}")
    return f"| {' | '.join(cell.translate(_ESCAPED) for cell in cells)} |"


def _text_value(tag: str, text: str) -> Summary.Value:
    return Summary.Value(
        tag=tag,
        metadata=create_summary_metadata(display_name=tag, description=""),
        tensor=TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode("utf-8", "replace")],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        ),
    )
