"""The run: how long, where, how often it is looked at and saved."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from hybridflow.config.ranges import ABOVE_0, AT_LEAST_0, AT_LEAST_1
from hybridflow.config.section import Section


class BackendKind(Enum):
    """Where workers run."""

    auto = "auto"
    local = "local"
    ray = "ray"


class ResumeChanged(Enum):
    """What becomes of a resumed run whose files have other contents than when its checkpoint was written."""

    refuse = "refuse"
    accept = "accept"


class Device(Enum):
    """What computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class Trainer(Section):
    """The run."""

    total_steps: Annotated[int, AT_LEAST_1] = 150
    """Training steps, counted from the start of the run, not of this process."""

    seed: Annotated[int, AT_LEAST_0] = 0
    """All randomness of the run follows from it."""

    experiment: str = "run"
    """Name of the run; also of its directory."""

    run_dir: str | None = None
    """Directory for everything the run writes; null means `runs/<experiment>`."""

    backend: BackendKind = BackendKind.auto
    """local: workers in this process; ray: one process per device; auto: local for one device, else ray."""

    devices: Annotated[int, AT_LEAST_1] = 1
    """Devices per node."""

    nodes: Annotated[int, AT_LEAST_1] = 1
    """Machines."""

    device: Device = Device.auto
    """auto: cuda if the Ray cluster (or, without one, this machine) has GPUs."""

    start_timeout_seconds: Annotated[float, ABOVE_0] = 600.0
    """Longest wait for the devices of a Ray cluster (held by other jobs, or still starting), and then for all ranks
    to meet."""

    hang_timeout_seconds: Annotated[float, ABOVE_0] = 45.0
    """Longest time without a heartbeat of a worker process on Ray. Native code that holds Python's lock stops them."""

    threads: Annotated[int | None, AT_LEAST_1] = None
    """CPU threads per worker process; null: on Ray the cores divided by the devices, else PyTorch's own choice."""

    eval_every: Annotated[int, AT_LEAST_0] = 25
    """Steps between evaluations; also before the first step and after the last. 0 turns it off."""

    save_every: Annotated[int, AT_LEAST_0] = 50
    """Steps between checkpoints; also after the last step. 0 saves nothing."""

    keep_checkpoints: Annotated[int, AT_LEAST_1] = 2
    """Latest checkpoints to keep."""

    stop_seconds: Annotated[float, ABOVE_0] = 25.0
    """Seconds from SIGTERM or the first Ctrl-C until a checkpoint is saved. A step that would end in time is finished,
    any other is abandoned. Clusters often kill 30 seconds after SIGTERM."""

    resume: str = "auto"
    """auto: from the run directory's last whole checkpoint; never: from the start; or a checkpoint's path."""

    resume_changed: ResumeChanged = ResumeChanged.refuse
    """Whether a run is resumed when its data (or its number of rows), models, reward functions or other code changed:
    refuse, or accept."""

    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Where metrics go: console, jsonl, tensorboard, wandb, mlflow."""

    samples_every: Annotated[int, AT_LEAST_0] = 25
    """Steps between sample tables; 0 turns them off."""

    sample_rows: Annotated[int, AT_LEAST_1] = 6
    """Rows of a sample table."""
