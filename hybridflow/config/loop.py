"""Settings of the run: its length, devices, evaluation and checkpoints."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from hybridflow.config.elastic import Elastic
from hybridflow.config.faults import Faults
from hybridflow.config.placement import Device, ParallelismKind
from hybridflow.config.ranges import ABOVE_0, AT_LEAST_0, AT_LEAST_1, AT_LEAST_1_OR_AUTO, FROM_0_TO_BELOW_1
from hybridflow.config.section import Section


class BackendKind(Enum):
    """Where workers run."""

    auto = "auto"
    local = "local"
    ray = "ray"


class ResumeChanged(Enum):
    """Whether a run may resume although the contents of its input files have changed since its checkpoint."""

    refuse = "refuse"
    accept = "accept"


@dataclass
class Trainer(Section):
    """Run-level settings: duration, devices, checkpoints and output."""

    total_steps: Annotated[int, AT_LEAST_0] = 150
    """Total number of training steps, including those before a resume; 0 only evaluates the model."""

    epochs: Annotated[float | None, ABOVE_0] = None
    """Passes over the training data, which give the total steps; null uses total_steps. With both set, the run ends at
    whichever is reached first."""

    seed: Annotated[int, AT_LEAST_0] = 0
    """Random seed of the run."""

    experiment: str = "run"
    """Name of the run and of its directory."""

    run_dir: str | None = None
    """Directory for everything the run writes; null means `runs/<experiment>`."""

    backend: BackendKind = BackendKind.auto
    """local: workers in this process; ray: one process per device; auto: local for one device, else ray."""

    devices: Annotated[int, AT_LEAST_1_OR_AUTO] = 1
    """Devices per node. auto (0): all devices of the Ray cluster or, without one, of this machine (without a Ray
    cluster, a machine without GPUs counts as one device), with the layouts of `trainer.parallelism=auto`."""

    parallelism: ParallelismKind = ParallelismKind.given
    """given: the sizes in each role's section. auto: hybridflow chooses the layouts of all roles, for the shortest
    predicted step, and keeps sizes that you set."""

    nodes: Annotated[int, AT_LEAST_1] = 1
    """Number of nodes."""

    device: Device = Device.auto
    """auto: cuda if the Ray cluster (or, without one, this machine) has GPUs."""

    device_file: str | None = None
    """Description of the devices for plans (`placement=auto` and others), as `hybridflow plan --calibrate` writes it:
    FILE.yaml, or FILE.yaml:NAME; null: the known device that is most like them."""

    start_timeout_seconds: Annotated[float, ABOVE_0] = 600.0
    """Maximum wait for the devices of a Ray cluster (used by other jobs, or still starting), for all ranks to connect,
    for a process to load its model, and, after nodes were lost, for `elastic.min_devices`."""

    hang_timeout_seconds: Annotated[float, ABOVE_0] = 20.0
    """Time without progress of any worker process after which a run on Ray is considered hung, and the longest time
    without a heartbeat of a process that is known to be stopped. A process that sends none for another reason, such as
    native code that holds the GIL, has 2.25 times as long."""

    call_timeout_seconds: Annotated[float, ABOVE_0] = 7200.0
    """Maximum duration of a call of a worker process, such as the generation or the update of a step. On Ray only."""

    max_faults: Annotated[int, AT_LEAST_0] = 10
    """Maximum number of faults within an hour after which the run continues; 0 ends the run at the first."""

    faults: Faults = field(default_factory=Faults)
    """Policies by kind of fault."""

    spare_processes: Annotated[int | None, AT_LEAST_0] = None
    """Maximum number of idle processes per node that have imported everything and replace lost ones within seconds;
    null: as many as a pool has processes there; 0: none. On Ray, for pools of CPUs."""

    elastic: Elastic = field(default_factory=Elastic)
    """When the run continues on other devices because nodes leave or join the cluster."""

    restarts: Annotated[int, AT_LEAST_0] = 0
    """Maximum number of times that the run's process (the driver) is started again after it is killed or crashes; it
    resumes from the newest checkpoint. Errors that the run reports, and signals that stop it, end the run. No effect in
    sweeps and on runs from Python."""

    snapshot_fraction: Annotated[float, FROM_0_TO_BELOW_1] = 0.02
    """Largest fraction of the time spent on copies of the trained state in host memory. After a fault, a run continues
    from the last copy or, without one, from the newest checkpoint; 0 keeps none. On Ray, and with backend=local if a
    policy of `trainer.faults` is retry or roll_back."""

    no_learning_steps: Annotated[int | None, AT_LEAST_1] = None
    """End the run after this many consecutive steps from which nothing can be learned: all samples of each prompt have
    the same score, over 90% of the responses are cut off, or the gradient is zero. null: only warn, after 3 steps."""

    threads: Annotated[int | None, AT_LEAST_1] = None
    """CPU threads per worker process; null: on Ray the cores divided by the devices, else PyTorch's default."""

    eval_every: Annotated[int, AT_LEAST_0] = 25
    """Steps between evaluations; the model is also evaluated before the first step and after the last. 0 turns
    evaluation off."""

    save_every: Annotated[int, AT_LEAST_0] = 50
    """Steps between checkpoints; the last step is also saved. 0 turns saving off."""

    async_save: bool = True
    """Write checkpoints while training continues, from a copy of the weights and the optimizer's state in host memory.
    false: training waits until a checkpoint is complete."""

    checkpoint_url: str | None = None
    """URL to which complete checkpoints are copied while training continues, such as s3://bucket/runs/x. A run resumes
    from there, on any machine, if its directory has no later checkpoint. null: no copies."""

    keep_checkpoints: Annotated[int, AT_LEAST_1] = 2
    """Number of most recent checkpoints to keep."""

    keep_every: Annotated[int, AT_LEAST_0] = 0
    """Checkpoints of every n-th step that are kept in addition; 0 keeps none."""

    keep_best: Annotated[int, AT_LEAST_0] = 0
    """Number of checkpoints with the best evaluation to keep in addition."""

    best_metric: str | None = None
    """Metric of the evaluation by which checkpoints are compared; null: the only val-core metric."""

    greater_is_better: bool | None = None
    """Whether a checkpoint is better if its best_metric is greater; null: unless its name ends in "loss" or
    "perplexity"."""

    stop_seconds: Annotated[float, ABOVE_0] = 25.0
    """Seconds from SIGTERM or the first Ctrl-C until a checkpoint must be saved. A step that can finish in time is
    finished, otherwise it is abandoned. Clusters often kill a job 30 seconds after SIGTERM."""

    resume: str = "auto"
    """auto: from the last complete checkpoint in the run directory; never: from the start; or a checkpoint's path."""

    resume_changed: ResumeChanged = ResumeChanged.refuse
    """Whether a run may resume if data, models, reward functions or other code have changed since the checkpoint:
    refuse or accept."""

    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Destinations of the metrics: console, jsonl, tensorboard, wandb, mlflow."""

    trace_steps: Annotated[int, AT_LEAST_0] = 20
    """Latest steps whose calls are in trace.json (at most twice as many), for https://ui.perfetto.dev; 0 writes no
    trace."""

    samples_every: Annotated[int, AT_LEAST_0] = 25
    """Steps between tables of training samples; 0 turns them off. The first and the last step of a run
    have one too, unless the run has evaluated."""

    sample_rows: Annotated[int, AT_LEAST_1] = 6
    """Number of rows in a table of samples."""

    sample_token_ids: bool = False
    """Write the token ids of responses to samples.jsonl, in addition to their text; of episodes, also `response_mask`
    (1 for sampled tokens) and `fork_starts`."""
