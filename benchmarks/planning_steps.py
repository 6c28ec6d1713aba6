"""The steps that others have published, in the words of the cost models, and their predicted seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.planning_published import cluster_of, geometry_of
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Efficiency
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.timing.generation import generation_seconds
from hybridflow.mapping.timing.training import forward_seconds, update_seconds
from hybridflow.mapping.timing.transfers import Transition, batch_seconds, publish_seconds
from hybridflow.mapping.workload import Lengths, Workload


class Step(NamedTuple):
    """A step: one batch is generated, and roles are updated with it."""

    use: ModelUse
    rollout_use: ModelUse
    training: TrainingLayout
    rollout: RolloutLayout
    workload: Workload
    forwards: int
    """Forward passes in addition to the update."""

    batches_in_flight: float


class PhaseSeconds(NamedTuple):
    """The phases of a step."""

    generation: float
    forwards: float
    """Log-probabilities, in passes of their own."""

    update: float
    transfers: float
    """Weights to the rollout, and the batch to training."""


def phase_seconds(step: Step, device: str, efficiency: Efficiency | None) -> PhaseSeconds:
    """Seconds of each phase of a step."""
    own = 0 if step.rollout.is_colocated else step.rollout.num_devices
    cluster = cluster_of(device, step.training.num_devices + own, efficiency)
    generating = generation_seconds(
        step.rollout_use, step.rollout, step.workload, cluster, batches_in_flight=step.batches_in_flight
    )
    published = publish_seconds(step.use, step.training, step.rollout, cluster, Transition.per_tensor)
    return PhaseSeconds(
        generating.total,
        step.forwards * forward_seconds(step.use, step.training, step.workload, cluster).total,
        update_seconds(step.use, step.training, step.workload, cluster).total,
        published.total + batch_seconds(step.workload.tokens, step.training.data, cluster),
    )


def step_seconds(step: Step, device: str, efficiency: Efficiency | None) -> float:
    """Seconds of a step. A separate rollout generates the next batch meanwhile."""
    generating, *training = phase_seconds(step, device, efficiency)
    return generating + sum(training) if step.rollout.is_colocated else max(generating, sum(training))


def nemo_step(row: Sequence[Any], published: Mapping[str, Any]) -> Step:
    """The step of a row of NeMo-RL."""
    name, model, devices, generating, longest, mean, rows, generation, (tensor, sequence, expert, pipeline), _ = row
    trained = devices - generating
    training = TrainingLayout(
        engine=TrainingEngine.megatron,
        data=trained // (tensor * sequence * pipeline),
        pipeline=pipeline,
        sequence=sequence,
        tensor=tensor,
        expert=expert,
        sequence_parallel=tensor > 1,
        microbatch_tokens=1 if name in published["one_row_microbatches"] else longest,
        gradient_checkpointing=model not in published["no_recomputation"],
        offload_parameters=not generating,
        offload_optimizer=not generating,
    )
    rollout = RolloutLayout(
        engine="vllm", replicas=(generating or devices) // generation, tensor=generation, is_colocated=not generating
    )
    prompt = published["prompt"]
    workload = Workload(rows, Lengths.constant(prompt), Lengths.spread(mean - prompt, longest - prompt), rows // 512)
    use = ModelUse(geometry_of(model), 2, is_trained=True)
    generated = replace(use, value_bytes=1) if name in published["one_byte_generation"] else use
    in_flight = published["batches_in_flight"].get(name, 2) if generating else 1
    return Step(use, generated, training, rollout, workload, 2, in_flight)


def verl_step(row: Sequence[Any], published: Mapping[str, Any]) -> Step:
    """The step of a row of verl."""
    name, model, engine, devices, generating, minibatch, longest, generation, sizes, tokens, forwards, in_flight, _ = (
        row
    )
    tensor, sequence, expert, pipeline = sizes
    published = {**published, **published.get("own", {}).get(name, {})}
    training = TrainingLayout(
        engine=TrainingEngine[engine],
        data=(devices - generating) // (tensor * sequence * pipeline),
        pipeline=pipeline,
        sequence=sequence,
        tensor=tensor,
        expert=expert,
        sequence_parallel=tensor > 1,
        microbatch_tokens=tokens,
        offload_parameters=not generating,
        offload_optimizer=not generating,
    )
    rollout = RolloutLayout(
        engine="vllm", replicas=(generating or devices) // generation, tensor=generation, is_colocated=not generating
    )
    if name in published["eager"]:
        rollout = replace(rollout, captures_graphs=False)
    lengths = Lengths.spread(published["mean"], longest)
    workload = Workload(
        published["step_rows"], Lengths.constant(published["prompt"]), lengths, published["step_rows"] // minibatch
    )
    use = ModelUse(geometry_of(model), 2, is_trained=True)
    return Step(use, use, training, rollout, workload, forwards, in_flight)
