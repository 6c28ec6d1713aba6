"""The predicted step of a run next to the measured one: seconds of every call, idle pools and memory.

`asdict(comparison)` is the whole comparison as plain data, and `comparison_text` writes it for people.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hybridflow.mapping.explanation import step_facts
from hybridflow.mapping.explanation_text import devices_in_words
from hybridflow.mapping.measured import MeasuredStep
from hybridflow.mapping.memory.phases import gib
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.planner import Answer, PlannedStep
from hybridflow.observability.formatting import columns, counted, percent, short, table
from hybridflow.observability.printable import printable

_NOTICEABLE = 0.005
"""Fraction of a step that another plan must save to be named."""


@dataclass(frozen=True, kw_only=True)
class ComparedCall:
    """All calls of one name in a step."""

    name: str
    role: str
    pool: str | None
    """None if it needs no device."""

    predicted_seconds: float | None
    """None for calls of the driver and its functions, whose time is not modeled."""

    measured_seconds: float | None
    """None if the run did not make this call in a step."""


@dataclass(frozen=True, kw_only=True)
class ComparedPool:
    """A pool of devices. Memory is that of the fullest device, in the phase that needs most."""

    name: str
    num_devices: int
    roles: dict[str, str]
    """The layout of each role."""

    predicted_idle_fraction: float
    measured_idle_fraction: float | None
    predicted_peak_bytes: float
    measured_peak_bytes: float | None
    """None if the run did not record it."""


@dataclass(frozen=True, kw_only=True)
class OtherPlan:
    """A plan that the search prefers to the run's."""

    placement: str
    layouts: dict[str, str]
    """By role."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run's step as predicted and as measured."""

    title: str
    device: str
    num_devices: int
    devices_per_node: int
    num_steps: int
    """Measured steps."""

    mean_row_tokens: float
    """The mean length of a prompt and its response in the run, for which its step is predicted."""

    has_lengths: bool
    """Whether the run logged this length; otherwise it is assumed."""

    predicted_seconds: float
    measured_seconds: float
    measured_critical_seconds: float
    """Without the time in which the driver makes no call; the predicted step has no such time."""

    calls: list[ComparedCall]
    pools: list[ComparedPool]
    shorter_plan: OtherPlan | None
    """The plan that the search would choose now; None if its step is not predicted to be shorter."""


def compare(step: PlannedStep, measured: MeasuredStep, found: Answer, *, has_lengths: bool) -> Comparison:
    """The comparison of a run's own plan, its measurements, and the plans that a search finds for it."""
    cluster, work = step.request.cluster, step.request.workload
    best = found.plans[0] if found.plans else None
    is_shorter = best is not None and best.seconds < step.seconds * (1 - _NOTICEABLE)
    return Comparison(
        title=step.request.title,
        device=cluster.device.name,
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        num_steps=measured.num_steps,
        mean_row_tokens=work.row_tokens,
        has_lengths=has_lengths,
        predicted_seconds=step.seconds,
        measured_seconds=measured.seconds,
        measured_critical_seconds=measured.critical_seconds,
        calls=_calls(step, measured),
        pools=_pools(step, measured),
        shorter_plan=_other(best) if is_shorter and best is not None else None,
    )


def comparison_text(compared: Comparison) -> str:
    """The comparison for people."""
    lines = [*_header(compared), "", *_call_rows(compared), "", *_pool_rows(compared), "", *_conclusion(compared)]
    return printable("\n".join(lines)) + "\n"


def _calls(step: PlannedStep, measured: MeasuredStep) -> list[ComparedCall]:
    """The operations of the plan in order, then the calls that it has not."""
    known = measured.seconds_of(step.request.operations)
    calls: dict[str, ComparedCall] = {}
    for call, operation in zip(step_facts(step).calls, step.request.operations, strict=True):
        is_modeled = operation.kind is not OperationKind.functions
        before = calls[call.name].predicted_seconds if call.name in calls else 0.0
        calls[call.name] = ComparedCall(
            name=call.name,
            role=call.role,
            pool=call.pool,
            predicted_seconds=call.seconds + (before or 0.0) if is_modeled else None,
            measured_seconds=known.get(call.name),
        )
    others = [
        ComparedCall(
            name=name, role=name.partition(".")[0], pool=None, predicted_seconds=None, measured_seconds=total.seconds
        )
        for name, total in measured.calls.items()
        if name not in calls
    ]
    return [*calls.values(), *others]


def _pools(step: PlannedStep, measured: MeasuredStep) -> list[ComparedPool]:
    idle = dict(zip(step.pools, step.plan.schedule.idle_fractions, strict=True))
    return [
        ComparedPool(
            name=name,
            num_devices=num_devices,
            roles={role: step.layouts[role].in_words for role in roles},
            predicted_idle_fraction=idle[name],
            measured_idle_fraction=measured.idle_fractions.get(name),
            predicted_peak_bytes=max((phase.total for phase in step.phases(name)), default=0.0),
            measured_peak_bytes=measured.peak_bytes.get(name),
        )
        for name, (roles, num_devices) in step.pools.items()
    ]


def _other(best: PlannedStep) -> OtherPlan:
    layouts = {role: layout.in_words for role, layout in best.layouts.items()}
    return OtherPlan(placement=best.plan.name, layouts=layouts, seconds=best.seconds)


def _header(compared: Comparison) -> Iterator[str]:
    devices = devices_in_words(compared.num_devices, compared.devices_per_node, compared.device)
    yield f"{compared.title} on {devices}: predicted and measured"
    length = "the measured mean length" if compared.has_lengths else "an assumed mean length (the run logged none)"
    yield (
        f"Measured: medians of {counted(compared.num_steps, 'step')}. Predicted: for rows of {length},"
        f" {compared.mean_row_tokens:,.1f} tokens."
    )
    for pool in compared.pools:
        yield f"\npool {pool.name}: {counted(pool.num_devices, 'device')}"
        yield from columns([["  " + role, layout] for role, layout in pool.roles.items()])


def _call_rows(compared: Comparison) -> list[str]:
    rows = [["call", "pool", "predicted", "measured", "measured / predicted"]]
    for call in compared.calls:
        rows.append([call.name, call.pool or "-", *_numbers(call.predicted_seconds, call.measured_seconds)])
    rows.append(["critical path", "", *_numbers(compared.predicted_seconds, compared.measured_critical_seconds)])
    rows.append(["step", "", *_numbers(compared.predicted_seconds, compared.measured_seconds)])
    return table(rows, numbers=(2, 3, 4))


def _numbers(predicted: float | None, measured: float | None) -> list[str]:
    """Seconds and their ratio; `-` for what is unknown."""
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
    return [*("-" if seconds is None else short(seconds) for seconds in (predicted, measured)), ratio]


def _pool_rows(compared: Comparison) -> list[str]:
    rows = [["pool", "idle, predicted", "measured", "GiB per device, predicted", "measured", "measured / predicted"]]
    for pool in compared.pools:
        idle, peak = pool.measured_idle_fraction, pool.measured_peak_bytes
        rows.append(
            [
                pool.name,
                percent(pool.predicted_idle_fraction, 1),
                "-" if idle is None else percent(idle, 1),
                gib(pool.predicted_peak_bytes),
                "-" if peak is None else gib(peak),
                "-" if peak is None else f"{peak / pool.predicted_peak_bytes:.2f}",
            ]
        )
    return table(rows, numbers=(1, 2, 3, 4, 5))


def _conclusion(compared: Comparison) -> Iterator[str]:
    if (other := compared.shorter_plan) is None:
        yield "The search finds no plan with a shorter predicted step."
        return
    saved = compared.predicted_seconds - other.seconds
    yield (
        f"The search would now choose {other.placement}, with a predicted step of {short(other.seconds)} s instead of"
        f" {short(compared.predicted_seconds)} s ({percent(saved, compared.predicted_seconds)} less):"
    )
    yield from columns([["  " + role, layout] for role, layout in other.layouts.items()])
