"""A checked configuration to a running system: the only file that sees every room."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind, Device
from hybridflow.controller.backends import Backend, make_backend
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.data.demonstrations import load_demonstrations
from hybridflow.data.loader import PromptLoader, eval_batches
from hybridflow.data.prompts import load_prompts
from hybridflow.dataflows.evaluation import Evaluation
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.loop import Run
from hybridflow.dataflows.roles import Generates, Learns, Policy, Scores
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.errors import ResourceError
from hybridflow.launch.compose import Composed
from hybridflow.launch.roles import ACTOR, ROLLOUT, RoleSpec, is_evaluated, plan_roles, pool_sizes
from hybridflow.models.tokenizers import decode_responses, load_tokenizer
from hybridflow.observability.timers import StageTimers
from hybridflow.observability.trackers.interface import Tracker


@dataclass(frozen=True)
class DrivenData:
    """What the driver itself holds: the training stream, the held-out prompts, and how tokens become text."""

    loader: PromptLoader
    held_out: Batch | None
    tokenizer: PreTrainedTokenizerBase

    def decode(self, ids: Ragged) -> list[str]:
        """Texts of token ids, one a row."""
        return decode_responses(self.tokenizer, ids)


def load_data(config: Experiment, dataflow: type[Dataflow]) -> DrivenData:
    """Reads and checks all data files; raises before any process is started."""
    tokenizer = load_tokenizer(tokenizer_directory(config.model), pad_token=config.model.pad_token)
    load = load_demonstrations if dataflow.data == "demonstrations" else load_prompts
    loader = PromptLoader(
        load(config.data.train_files, config.data, tokenizer),
        config.data.batch_size,
        seed=config.trainer.seed,
        shuffle=config.data.shuffle,
    )
    held_out = None
    if is_evaluated(config):
        table = load_prompts(config.data.eval_files, config.data, tokenizer)
        held_out = next(iter(eval_batches(table, len(table), limit=config.data.eval_limit)))
    return DrivenData(loader, held_out, tokenizer)


def start_backend(config: Experiment) -> Backend:
    """The backend the configuration asks for; `auto` is local for one pool of one device."""
    sizes = pool_sizes(config)
    kind = config.trainer.backend
    if kind is BackendKind.auto:
        kind = BackendKind.local if sum(sizes.values()) == 1 else BackendKind.ray
    return make_backend(
        kind.name,
        devices=config.trainer.devices,
        nodes=config.trainer.nodes,
        device=device_name(config),
        threads=config.trainer.threads,
    )


def device_name(config: Experiment) -> str:
    """cpu or cuda. Raises `ResourceError` when cuda is asked for and there is none."""
    has_cuda = torch.cuda.is_available()
    if config.trainer.device is Device.cuda and not has_cuda:
        raise ResourceError(
            "trainer.device=cuda, and PyTorch finds no CUDA device here.",
            remedy="Use trainer.device=cpu, or install a CUDA build of PyTorch and check nvidia-smi.",
        )
    return "cuda" if has_cuda and config.trainer.device is not Device.cpu else "cpu"


def start_roles(config: Experiment, specs: list[RoleSpec], backend: Backend) -> dict[str, WorkerGroup]:
    """One worker group a role, each in its pool; the rollout is a view of the actor."""
    device = device_name(config)
    pools = {name: ResourcePool(name, size, device=device) for name, size in pool_sizes(config).items()}
    groups = {
        spec.name: WorkerGroup(spec.worker_class, pools[spec.pool], backend, role=spec.name, kwargs=spec.kwargs)
        for spec in specs
    }
    if ACTOR in groups:
        groups[ROLLOUT] = groups[ACTOR].view(ROLLOUT)
    return groups


@dataclass(frozen=True)
class Driver:
    """The tracker, timers and run directory of this process."""

    tracker: Tracker
    timers: StageTimers
    run_dir: Path


def assemble(
    composed: Composed,
    dataflow: type[Dataflow],
    settings: object,
    data: DrivenData,
    driver: Driver,
    stack: ExitStack,
) -> Run:
    """Starts backend and roles, and ties them to the loop; what is started ends with the stack."""
    config = composed.config
    specs = plan_roles(config, dataflow)
    backend = start_backend(config)
    stack.callback(backend.shutdown)
    groups = start_roles(config, specs, backend)
    program = dataflow(groups, settings=settings, samples_per_prompt=config.rollout.samples_per_prompt)
    return Run(
        trainer=config.trainer,
        dataflow=program,
        loader=data.loader,
        evaluation=_evaluation(config, groups, data),
        tracker=driver.tracker,
        timers=driver.timers,
        checkpoints=CheckpointStore(driver.run_dir, keep=config.trainer.keep_checkpoints),
        learners={spec.name: cast(Learns, groups[spec.name]) for spec in specs if spec.is_trained},
        policies=[cast(Policy, groups[ACTOR])] if ACTOR in groups else [],
        decode=data.decode,
        drain_calls=backend.drain_calls,
        num_devices=sum(pool_sizes(config).values()),
        config=composed.flat(),
    )


def _evaluation(config: Experiment, groups: Mapping[str, WorkerGroup], data: DrivenData) -> Evaluation | None:
    if data.held_out is None or "reward" not in groups or ROLLOUT not in groups:
        return None
    return Evaluation(
        rollout=cast(Generates, groups[ROLLOUT]),
        reward=cast(Scores, groups["reward"]),
        prompts=data.held_out,
        samples_per_prompt=config.rollout.eval_samples_per_prompt,
        decode=data.decode,
        sample_rows=max(config.trainer.sample_rows, 64),
    )
