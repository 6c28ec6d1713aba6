"""The planner's answer for people: plain columns, at most `WIDTH` wide, the same on a terminal and in a pipe."""

from collections.abc import Iterator
from textwrap import fill

from hybridflow.mapping.changes import IN_HOST_MEMORY, MOST_DEVICES
from hybridflow.mapping.contents import MemoryPhase
from hybridflow.mapping.explanation import Asked, EvaluatedChange, Explanation, StepFacts, explain
from hybridflow.mapping.memory.phases import GIB, gib
from hybridflow.mapping.memory.training import COPYING
from hybridflow.mapping.planner import Answer
from hybridflow.mapping.timing.storage import StorageTimes
from hybridflow.observability.formatting import columns, count, counted, percent, short, spoken_duration, table
from hybridflow.observability.printable import printable

WIDTH = 120
_LEAST_READ_BYTES = 1e8
"""Weights of fewer bytes are read in an instant, and not mentioned."""

CAUSES = {
    "matrix": "matrix products",
    "memory": "memory bandwidth",
    "tensor": "tensor-parallel all-reduces",
    "expert": "expert-parallel all-to-alls",
    "sequence": "sequence-parallel all-to-alls",
    "latency": "launches and latencies",
    "gathers": "gathering weights",
    "stages": "sending between stages",
    "bubbles": "pipeline bubbles",
    "gradients": "reducing gradients",
    "optimizer": "memory bandwidth of optimizer steps",
    "offload": "moving offloaded state",
    "prefill": "prefill of prompts",
    "weights": "reading weights to decode",
    "cache": "reading the KV cache",
    "sampling": "sampling from the logits",
    "requests": "scheduling responses",
    "launches": "kernel launches without CUDA graphs",
    "transfer": "transferring weights",
    "batch": "receiving the batch",
}
"""The parts of an operation's seconds, as what the operation is bound by."""


def text_of(found: Answer) -> str:
    """The explanation of an answer."""
    explained = explain(found)
    parts = _fitting(explained, explained.step) if explained.step is not None else _impossible(explained)
    lines = (line for part in [*_title(explained.asked), *parts] for line in part.split("\n"))
    wrapped = (fill(line, WIDTH, subsequent_indent="    ") if len(line) > WIDTH else line for line in lines)
    return printable("\n".join(wrapped)) + "\n"


def _title(asked: Asked) -> Iterator[str]:
    roles: dict[str, list[str]] = {}
    for role, parameters in asked.parameters.items():
        active = asked.active_parameters[role]
        size = f"{count(parameters)} parameters" + (f", {count(active)} active" if active != parameters else "")
        roles.setdefault(size, []).append(role)
    models = "; ".join(f"{', '.join(names)}: {size}" for size, names in roles.items())
    others = "".join(f" and {devices} (pool {name})" for name, devices in asked.other_devices.items())
    yield f"{asked.title} on {devices_in_words(asked.num_devices, asked.devices_per_node, asked.device)}{others}"
    yield models
    yield _workload(asked)


def _workload(asked: Asked) -> str:
    responses = counted(asked.responses_per_prompt, "response")
    longest = f"up to {asked.longest_prompt_tokens:,.0f} + {asked.longest_response_tokens:,.0f} tokens"
    mean = f"{round(asked.mean_prompt_tokens, 1):,g} + {round(asked.mean_response_tokens, 1):,g} on average"
    return f"{counted(asked.prompts, 'prompt')} x {responses} of {longest}, {mean}"


def devices_in_words(number: int, per_node: int, device: str) -> str:
    """`16 x H100 (2 nodes of 8)`."""
    nodes = -(-number // per_node)
    return f"{number} x {device}" + (f" ({nodes} nodes of {per_node})" if nodes > 1 else "")


def _fitting(explained: Explanation, step: StepFacts) -> Iterator[str]:
    rate = f"{float(f'{step.tokens_per_second:.2g}'):,.0f}" if step.tokens_per_second >= 10 else "fewer than 10"
    yield f"It fits: a step takes about {spoken_duration(step.seconds)}, {rate} tokens per second."
    if explained.asked.lag:
        names = [call.name for call in step.calls if call.is_ahead]
        verb = "runs" if len(names) == 1 else "run"
        yield f"{' and '.join(names)} {verb} {counted(explained.asked.lag, 'step')} ahead of the other calls."
    for pool in step.pools:
        idle = f", idle for {percent(pool.idle_fraction, 1)} of the step" if pool.idle_fraction > 0 else ""
        is_own = pool.device != explained.asked.device
        size = f"{pool.num_devices} x {pool.device}" if is_own else counted(pool.num_devices, "device")
        yield f"\npool {pool.name}: {size}{idle}"
        yield from columns([["  " + role.role, role.layout] for role in pool.roles])
    if step.idle_devices:
        yield f"\nnot used: {counted(step.idle_devices, 'device')}"
    yield ""
    yield from _calls(step)
    yield ""
    yield from _memory(explained.asked, step)
    yield ""
    yield from _storage(step.storage, explained.asked)
    if len(explained.placements) > 1:
        yield ""
        yield from _placements(explained)
    yield ""
    yield from _conclusion(explained, step)


def _calls(step: StepFacts) -> Iterator[str]:
    rows = [["call", "pool", "start", "seconds", "share", "critical", "mostly bound by"]]
    for call in step.calls:
        part = call.largest_part
        bound = f"{CAUSES.get(part, part)} ({percent(call.parts_seconds[part], call.seconds)})" if part else "-"
        numbers = [short(call.start_seconds), short(call.seconds), percent(call.share, 1)]
        rows.append([call.name, call.pool or "-", *numbers, "yes" if call.is_critical else "no", bound])
    yield from table(rows, numbers=(2, 3, 4))


def _memory(asked: Asked, step: StepFacts) -> Iterator[str]:
    is_alike = all(pool.device == asked.device for pool in step.pools)
    card = f", of {gib(asked.device_memory_bytes)} GiB" if is_alike else ""
    rows = [["pool", "phase", "GiB", "free", f"contents per device{card}"]]
    for pool in step.pools:
        for phase in pool.memory:
            rows.append([pool.name, phase.name, gib(phase.total_bytes), gib(phase.free_bytes), _contents(phase)])
    yield from table(rows, numbers=(2, 3))
    for phase in step.tight_phases:
        copies = phase.name.startswith(COPYING)
        lower = "set trainer.snapshot_fraction=0" if copies else "lower the role's microbatch_tokens"
        yield (
            f"Only {gib(phase.free_bytes)} GiB are free while {phase.name}, and predictions of memory may be wrong by"
            f" more. If the run runs out of memory, {lower}."
        )
    for pool in step.pools:
        if pool.host_bytes:
            room = f"{gib(pool.host_bytes)} of {gib(pool.offload_bytes)} GiB"
            contents = ", ".join(f"{name} {gib(size)}" for name, size in pool.host_contents.items() if size)
            yield f"In host memory, for each device of pool {pool.name}: {room} ({contents})."


def _storage(times: StorageTimes, asked: Asked) -> Iterator[str]:
    """The times of a start and of a checkpoint; nothing for small models."""
    if times.read_bytes < _LEAST_READ_BYTES:
        return
    node = "each node" if asked.num_devices > asked.devices_per_node else "the node"
    yield f"Start: {node} reads {_gb(times.read_bytes)} of weights in about {spoken_duration(times.read_seconds)}."
    if times.checkpoint_bytes:
        yield (
            f"Checkpoint: {_gb(times.checkpoint_bytes)}, written in about {spoken_duration(times.write_seconds)} while"
            f" training continues, after a copy to host memory of about {spoken_duration(times.copy_seconds)}."
        )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"


def _contents(phase: MemoryPhase) -> str:
    contents = sorted(phase.contents.items(), key=lambda each: -each[1])
    least = max(phase.total_bytes / 50, GIB / 20)
    return ", ".join(f"{name} {gib(size)}" for name, size in contents if size >= least) or "-"


def _placements(explained: Explanation) -> Iterator[str]:
    rows = [["placement", "kind", "devices", "seconds", "longer"]]
    for place in explained.placements:
        devices = " | ".join(map(str, place.pool_devices.values()))
        longer = f"+{percent(place.longer_seconds, place.seconds - place.longer_seconds)}"
        is_best = place is explained.placements[0]
        rows.append(
            [place.name, ", ".join(place.kinds), devices, short(place.seconds), "chosen" if is_best else longer]
        )
    yield from table(rows, numbers=(3, 4))


def _conclusion(explained: Explanation, step: StepFacts) -> Iterator[str]:
    call = next((call for call in step.calls if call.name == explained.bottleneck), None)
    if call is not None and call.largest_part:
        cause = CAUSES.get(call.largest_part, call.largest_part)
        yield f"Bottleneck: {call.name} takes {percent(call.share, 1)} of the step, and is mostly bound by {cause}."
    if not explained.changes:
        yield "No single change that was tried shortens the step."
        return
    first, *others = explained.changes
    yield f"Next best change: {_saving(first)}"
    yield from (f"Then: {_saving(each)}" for each in others)


def _saving(change: EvaluatedChange) -> str:
    saved = change.saved_seconds or 0.0
    share = percent(saved, change.seconds + saved)
    return f"{change.change} saves about {spoken_duration(saved)} of each step ({share})."


def _impossible(explained: Explanation) -> Iterator[str]:
    yield "It does not fit." + (" Roles need at least:" if explained.needed else " No role has a layout.")
    if explained.needed:
        yield ""
        yield from _needed(explained)
    if explained.sharding_problems:
        yield "\nEngines that cannot shard a model:"
        yield from (f"  {problem}." for problem in explained.sharding_problems)
    yield ""
    yield from _changes(explained)


def _needed(explained: Explanation) -> Iterator[str]:
    asked = explained.asked
    on_device = [need.memory for need in explained.needed if need.memory.name != IN_HOST_MEMORY]
    cards = {gib(memory.total_bytes + memory.free_bytes) for memory in on_device}
    card = f", of {gib(asked.device_memory_bytes)} GiB" if len(cards) == 1 else ""
    rows = [["roles", "devices", "phase", "GiB", "short", f"contents per device{card}"]]
    for need in explained.needed:
        name = need.roles[0] if len(need.roles) == 1 else "all together"
        short_by = gib(-need.memory.free_bytes) if need.memory.free_bytes < 0 else "fits"
        numbers = [gib(need.memory.total_bytes), short_by]
        rows.append([name, str(need.num_devices), need.memory.name, *numbers, _contents(need.memory)])
    yield from table(rows, numbers=(1, 3, 4))
    if any(need.memory.name == IN_HOST_MEMORY for need in explained.needed):
        yield f"Host memory for what is offloaded or copied: {gib(asked.offload_bytes)} GiB per device."


def _changes(explained: Explanation) -> Iterator[str]:
    asked = explained.asked
    least = explained.least_devices
    if least is None:
        yield f"No number of {asked.device} up to {MOST_DEVICES:,} is enough."
    else:
        yield (
            f"The smallest number of {asked.device} that fits: {least.num_devices}, with steps of about"
            f" {spoken_duration(least.seconds)}."
        )
    if explained.changes:
        yield f"The single change that helps most: {_making_room(explained.changes[0])}"
        yield from (f"Then: {_making_room(each)}" for each in explained.changes[1:])
    else:
        yield "No single change that was tried needs fewer devices."


def _making_room(change: EvaluatedChange) -> str:
    return (
        f"{change.change}; it then fits on {change.num_devices} x {change.device}, with steps of about"
        f" {spoken_duration(change.seconds)}."
    )
