"""One step of a dataflow as a drawing that a notebook shows."""

import io
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hybridflow.api.experiment import Algorithm, Experiment, Settings, settings_in
from hybridflow.api.inputs import Inputs
from hybridflow.graph.svg import svg_drawing
from hybridflow.graph.text import text_drawing
from hybridflow.graph.trace import Trace
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.step_trace import plan_to_show, trace_step


@dataclass(frozen=True)
class Drawing:
    """A traced step: its calls in order, the columns that each reads and adds, and what runs concurrently."""

    trace: Trace

    @property
    def svg(self) -> str:
        """The drawing as an SVG image."""
        return svg_drawing(self.trace)

    def save(self, file: str | Path) -> Path:
        """Writes the SVG image; returns its path."""
        path = Path(file)
        path.write_text(self.svg, encoding="utf-8")
        return path

    def __repr__(self) -> str:
        written = io.StringIO()
        console = Console(file=written, width=110, highlight=False, force_jupyter=False, color_system=None)
        console.print(text_drawing(self.trace))
        return written.getvalue()

    def _repr_html_(self) -> str:
        return self.svg


def show(algorithm: Algorithm = "ppo", settings: Settings | None = None) -> Drawing:
    """Draws one step of an algorithm or of a dataflow class, as `hybridflow show` does. Starts nothing."""
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
        name, typed = settings_in(Experiment(algorithm, settings or {}), Inputs(Path(folder)))
        return Drawing(trace_step(plan_to_show(compose_run(typed, config_name=name))))
