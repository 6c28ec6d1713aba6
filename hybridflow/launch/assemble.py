"""Turns a prepared run into a running system; the only file that imports every package."""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

from hybridflow.config.derived import is_of_cpus, num_devices, optimizer_steps_per_step
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind, Trainer
from hybridflow.config.rollout import DEFAULT_SEQUENCES
from hybridflow.controller.backends import Backend, BackendOptions, make_backend
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.data.loader import Rows
from hybridflow.dataflows.evaluate import Generate
from hybridflow.dataflows.evaluation import Evaluate, Keep, OnPart, Parts, evaluate_held_out, evaluate_responses
from hybridflow.dataflows.generation import generate_responses, rows_of_responses
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Policy, Sampler, Scorer, Trainable
from hybridflow.dataflows.run import Run
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.fault_recovery import FaultHistory, FaultRecovery
from hybridflow.elastic.mirror import Mirror
from hybridflow.elastic.remote import remote_checkpoints
from hybridflow.elastic.retention import Retention
from hybridflow.elastic.stopping import Stop
from hybridflow.launch.plan.data import RunData, with_precomputed
from hybridflow.launch.plan.dataflow import calling
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, is_colocated
from hybridflow.launch.prepare import Prepared
from hybridflow.launch.responses_file import ResponsesFile, origin_of_responses
from hybridflow.launch.shared_storage import meet_nodes, read_directories
from hybridflow.launch.start_roles import connect_rollout, resource_pools, start_roles
from hybridflow.observability.fault_ledger import FAULTS_FILE
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.performance import StageTimers
from hybridflow.observability.samples import Sample
from hybridflow.observability.trace import TRACE_FILE, CallTrace
from hybridflow.observability.trackers.interface import Tracker
from hybridflow.rewards.factory import all_need_answers

logger = logging.getLogger(__name__)

_FULL_BATCHES, _PARTS = 4, 10
"""The maximum number of full batches (the sequences that all devices decode together) per part of an evaluation, and
the number of parts into which a smaller evaluation is divided, if each of them has a full batch."""


def assemble(
    prepared: Prepared,
    tracker: Tracker,
    timers: StageTimers,
    stack: ExitStack,
    *,
    stop: Stop,
    report: Callable[[], None],
    begun: Callable[[], None],
    history: FaultHistory,
) -> Run:
    """Starts the backend and the roles and connects them to the loop; closing the stack stops them."""
    plan, data = prepared.plan, prepared.data
    config, trainer = plan.config, plan.config.trainer
    backend = make_backend(plan.backend.name, _options(plan, stop))
    stack.callback(backend.shutdown)
    meet = None
    if plan.backend is BackendKind.ray:
        read = read_directories(plan, prepared.checkpoint)
        meet = partial(meet_nodes, backend, run_dir=prepared.directory, read=read)
    groups = start_roles(plan.roles, resource_pools(plan), backend, meet=meet)
    with calling(plan.dataflow, "__init__"):
        program = plan.dataflow(groups, settings=plan.settings, samples_per_prompt=config.rollout.samples_per_prompt)
    program.streams, program.seed = data.streams, trainer.seed
    program.wants_old_logprobs = plan.wants_old_logprobs
    program.max_response_tokens = config.data.max_response_tokens
    data = with_precomputed(program, data, prepared.directory)
    store = CheckpointStore(prepared.directory, keep=Retention.of(trainer), world=num_devices(config))
    return Run(
        trainer=trainer,
        dataflow=program,
        streams=data.streams,
        evaluations=_evaluations(prepared, data, program, groups, timers.part, partial(tracker.log_samples, 0)),
        tracker=tracker,
        timers=timers,
        checkpoints=store,
        mirror=mirror_of(trainer, store, stack),
        learners={name: cast(Trainable, groups[name]) for name in plan.trained},
        policies=[cast(Policy, groups[ACTOR])] if ACTOR in groups else [],
        decode=data.decode,
        trace=_call_trace(prepared, backend, stack),
        num_devices=num_devices(config),
        config=plan.composed.redacted(),
        inputs=prepared.inputs,
        calls=backend,
        asynchrony=config.asynchrony,
        rollout_overlaps=plan.backend is BackendKind.ray and not is_colocated(config),
        optimizer_steps=optimizer_steps_per_step(config, config.actor),
        stop=stop,
        report=report,
        begun=begun,
        recovery=_fault_recovery(prepared, backend, groups, history),
    )


def _options(plan: RunPlan, stop: Stop) -> BackendOptions:
    config, trainer = plan.config, plan.config.trainer
    on_cpus = {pool: size for pool, size in plan.pools.items() if is_of_cpus(config, pool)}
    return BackendOptions(
        devices=trainer.devices,
        nodes=trainer.nodes,
        device=plan.device,
        cpu_devices=sum(on_cpus.values()),
        function_devices=sum(size for pool, size in on_cpus.items() if plan.has_only_functions(pool)),
        threads=trainer.threads,
        start_timeout_seconds=trainer.start_timeout_seconds,
        hang_timeout_seconds=trainer.hang_timeout_seconds,
        call_timeout_seconds=trainer.call_timeout_seconds,
        room_timeout_seconds=None if trainer.elastic.min_devices is None else trainer.elastic.wait_seconds,
        spare_processes=trainer.spare_processes if trainer.max_faults else 0,
        while_waiting=stop.check,  # the driver may have to stop while it waits for workers
    )


def mirror_of(trainer: Trainer, store: CheckpointStore, stack: ExitStack) -> Mirror | None:
    """Copies checkpoints to `trainer.checkpoint_url` from now on, if that is set, until the stack is closed."""
    remote = remote_checkpoints(trainer) if trainer.save_every else None
    if remote is None:
        return None
    mirror = Mirror(store, remote)
    stack.callback(mirror.end)
    return mirror


def _fault_recovery(
    prepared: Prepared, backend: Backend, groups: Mapping[str, WorkerGroup], history: FaultHistory
) -> FaultRecovery:
    return FaultRecovery(
        backend,
        trainer=prepared.plan.config.trainer,
        learner_pools={groups[name].pool.name for name in prepared.plan.trained},
        pool_of={name: group.pool.name for name, group in groups.items()},
        reconnect=partial(connect_rollout, groups),
        ledger=prepared.directory / FAULTS_FILE,
        respawns=prepared.plan.backend is BackendKind.ray,
        history=history,
    )


def _call_trace(prepared: Prepared, backend: Backend, stack: ExitStack) -> CallTrace:
    """The record of the run's calls, which a run that trains writes to its directory; the stack closes it."""
    trainer, checkpoint = prepared.plan.config.trainer, prepared.checkpoint
    trace = CallTrace(
        backend.drain_calls,
        prepared.plan.pools,
        prepared.directory / TRACE_FILE,
        keep=trainer.trace_steps if trainer.total_steps else 0,
        resume_after=checkpoint.step if checkpoint else 0,
    )
    stack.callback(trace.close)
    return trace


def _evaluations(
    prepared: Prepared, data: RunData, program: Dataflow, groups: Mapping[str, WorkerGroup], on_part: OnPart, keep: Keep
) -> list[Evaluate]:
    """The dataflow's own evaluation of held-out rows, the scores of sampled responses, or both.

    A run that only evaluates keeps its samples part by part.
    """
    plan, found = prepared.plan, list[Evaluate]()
    if data.held_out is not None:
        found.append(partial(evaluate_held_out, program, data.held_out, on_part))
    if data.questions is not None:
        parts = _parts(data.questions, plan.config, num_devices(plan.config), on_part)
        if isinstance(plan.settings, Generate.Settings) and plan.settings.out:
            found.append(partial(_generate, prepared, plan.settings, groups, parts))
        else:
            found.append(_answers(plan.config, groups, data, parts, keep))
    if not found and plan.is_evaluated:
        logger.warning(
            "trainer.eval_every=%d has no effect: dataflow=%s has no roles 'rollout' and 'reward' to evaluate with",
            plan.config.trainer.eval_every, plan.config.dataflow,
        )  # fmt: skip
    return found


def _parts(questions: Rows, config: Experiment, devices: int, on_part: OnPart) -> Parts:
    """Parts of equal size that keep the rollout busy and let progress be seen."""
    sequences = devices * (config.rollout.max_sequences or DEFAULT_SEQUENCES)
    used = min(len(questions), config.data.eval_limit or len(questions))
    batches = used * config.rollout.eval_samples_per_prompt / sequences
    count = max(math.ceil(batches / _FULL_BATCHES), min(int(batches), _PARTS))
    return Parts(questions, max(1, min(count, used // devices)), on_part, limit=used)


def _generate(
    prepared: Prepared, settings: Generate.Settings, groups: Mapping[str, WorkerGroup], parts: Parts
) -> tuple[Metrics, list[Sample]]:
    """Writes responses to the file of `hybridflow generate`; there are no metrics and no samples."""
    samples = prepared.plan.config.rollout.eval_samples_per_prompt
    composed = prepared.plan.composed
    made_with = origin_of_responses(composed, prepared.inputs)
    rows_per_prompt = 1 if settings.by_prompt else samples
    as_rows = partial(
        rows_of_responses, decode=prepared.data.decode, token_ids=settings.token_ids, by_prompt=settings.by_prompt
    )
    with ResponsesFile(Path(settings.out)).opened(made_with, rows_per_prompt=rows_per_prompt) as opened:
        generate_responses(
            cast(Sampler, groups[ROLLOUT]),
            parts,
            samples_per_prompt=samples,
            ranks=num_devices(prepared.plan.config),
            rows_of=as_rows,
            write=opened.write,
            done=opened.prompts,
        )
    return {}, []


def _answers(
    config: Experiment, groups: Mapping[str, WorkerGroup], data: RunData, parts: Parts, keep: Keep
) -> Evaluate:
    reward, trainer = config.reward, config.trainer
    is_accuracy = len(reward.functions) == 1 and all_need_answers(reward)
    return partial(
        evaluate_responses,
        rollout=cast(Sampler, groups[ROLLOUT]),
        reward=cast(Scorer, groups["reward"]) if "reward" in groups else None,
        parts=parts,
        samples_per_prompt=config.rollout.eval_samples_per_prompt,
        decode=data.decode,
        sample_rows=max(trainer.sample_rows, 64) if trainer.total_steps else keep,
        with_ids=trainer.sample_token_ids,
        what="acc" if is_accuracy else "reward",
    )
