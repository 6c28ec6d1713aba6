"""Published numbers without a layout or lengths, or of other engines, next to predictions with stated assumptions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.planning_cells import cells, ppo_operations, predicted
from benchmarks.planning_published import cluster_of, geometry_of, read
from benchmarks.planning_report import Criterion, Section, rank_correlation
from benchmarks.planning_steps import Step, step_seconds, verl_step
from hybridflow.config.placement import PlacementKind
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.candidates import Given
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.planner import answer
from hybridflow.mapping.request import PlannedModel, PlannedRollout, Request
from hybridflow.mapping.timing.generation import generation_seconds
from hybridflow.mapping.timing.training import update_seconds
from hybridflow.mapping.timing.work import forward_flops
from hybridflow.mapping.workload import Lengths, Workload

_ENGINES = (TrainingEngine.fsdp, TrainingEngine.megatron)
_VERL = Workload(8192, Lengths.constant(150), Lengths.spread(1024, 8192), 4)
_PAPER_SCALING = 0.668
"""Mean strong-scaling efficiency of HybridFlow over three algorithms and four sizes (sec. 8.2)."""


def sections() -> list[Section]:
    """The tables."""
    return [_mfu(), _ahead(), _deepspeed(), _openrlhf(), _tail(), _scaling(), _not_predicted()]


@cache
def _rows() -> Mapping[str, Any]:
    return read("other_rows.yaml")


def _line(number: str, label: str, published: str, predicted: str) -> str:
    return f"  {number:>4} {label:<58} published {published:>9} predicted {predicted:>9}"


def _mfu() -> Section:
    """Model FLOPs of an update as a fraction of the peak; falls with more devices, as each has fewer microbatches."""
    table = _rows()["mfu"]
    use, lines, found = (
        ModelUse(geometry_of(table["model"]), 2, is_trained=True),
        [f"  {_rows()['mfu']['assumed']}"],
        [],
    )
    for number, devices, published in table["rows"]:
        cluster = cluster_of(table["device"], devices, None)
        layout = TrainingLayout(
            engine=TrainingEngine.megatron,
            data=devices,
            expert=table["expert"],
            microbatch_tokens=10240,
            gradient_checkpointing=False,
        )
        seconds = update_seconds(use, layout, _VERL, cluster).total
        flops = 3 * forward_flops(use, _VERL.tokens, _VERL.rows * _VERL.squared_row_tokens)
        found.append(flops / seconds / devices / cluster.device.matrix_flops)
        lines.append(
            _line(number, f"{table['model']}, {devices} {table['device']}", f"{published}", f"{found[-1]:.2f}")
        )
    lines.append(f"  {table['why']}")
    falls = found == sorted(found, reverse=True)
    return Section(
        "verl: MFU of updates",
        lines,
        [Criterion("MFU falls with more devices", ", ".join(f"{each:.2f}" for each in found), falls)],
    )


def _ahead() -> Section:
    """Runs whose rollout never drains, on devices of its own, against the same work on all devices in turn."""
    lines, right, rows = [f"  {_rows()['ahead']['assumed']}"], 0, _rows()["ahead"]["rows"]
    for row in rows:
        lengths = Lengths.spread(row["mean"], row["longest"])
        workload = Workload(row["rows"], Lengths.constant(150), lengths, row["optimizer_steps"])
        devices, generating = row["devices"], row["generating"]
        both = [
            _step_seconds(row, workload, devices[0], 0, 1),
            min(_step_seconds(row, workload, devices[1], size, 1 + row["ahead"]) for size in generating),
        ]
        published = row["seconds"]
        right += (both[1] < both[0]) == (published[1] < published[0])
        label = f"{row['model']}, {devices[0]} {row['device']}"
        lines.append(_line(row["name"], f"{label}, in turn", f"{published[0]} s", f"{both[0]:.0f} s"))
        lines.append(_line(row["name"], f"{label}, ahead", f"{published[1]} s", f"{both[1]:.0f} s"))
        ratios = f"{published[1] / published[0]:.2f}", f"{both[1] / both[0]:.2f}"
        lines.append(_line(row["name"], "ratio", *ratios))
    found = Criterion("sign", f"{right} of {len(rows)}", right == len(rows))
    return Section(
        "AReaL and NeMo-RL: asynchronous against synchronous", [*lines, f"  {_rows()['ahead']['why']}"], [found]
    )


def _step_seconds(row: Mapping[str, Any], workload: Workload, devices: int, generating: int, in_flight: float) -> float:
    use = ModelUse(geometry_of(row["model"]), 2, is_trained=True)
    training = TrainingLayout(
        engine=TrainingEngine.fsdp, data=devices - generating, microbatch_tokens=max(row["longest"], 8192)
    )
    rollout = RolloutLayout(engine="vllm", replicas=generating or devices, is_colocated=not generating)
    step = Step(use, use, training, rollout, workload, 1, in_flight)
    return step_seconds(step, row["device"], None)


def _deepspeed() -> Section:
    """Hours of DeepSpeed-Chat's third step, which generates without vLLM: the prediction is what our engines need."""
    table = _rows()["deepspeed_chat"]
    lines, pairs = [f"  {table['assumed']}"], []
    workload = Workload(1024, Lengths.constant(256), Lengths.constant(256), 1)
    for number, model, devices, published in table["rows"]:
        small = {"critic": "0.35B", "reward": "0.35B"}
        request = _ppo_request({"actor": model, "reference": model, **small}, workload, table["device"], devices)
        seconds = _seconds(replace(request, placement=PlacementKind.colocated))
        hours = seconds * table["prompts"] / workload.rows / 3600
        shown = f"{hours:.2f} h" if seconds else "no fit"
        lines.append(_line(number, f"OPT-{model}, {devices} {table['device']}", f"{published} h", shown))
        pairs += [(published, hours)] if seconds else []
    lines.append(f"  {table['why']}")
    order = rank_correlation(*zip(*pairs, strict=True))
    return Section(
        "DeepSpeed-Chat: hours of PPO",
        lines,
        [Criterion("Spearman's rank correlation is at least 0.9", f"{order:.3f}", order >= 0.9)],
    )


def _openrlhf() -> Section:
    """Seconds for 1,024 prompts on OpenRLHF's own allocation of devices."""
    table = _rows()["openrlhf"]
    lines = [f"  {table['assumed']}"]
    workload = Workload(1024, Lengths.constant(1024), Lengths.constant(1024), 8)
    for number, model, trained, frozen, engines, tensor, published in table["rows"]:
        pools = {
            "actor": trained,
            "critic": trained,
            "reference": frozen,
            "reward": frozen,
            "rollout": engines * tensor,
        }
        request = _ppo_request(
            dict.fromkeys(("actor", "reference", "critic", "reward"), model),
            workload,
            table["device"],
            sum(pools.values()),
        )
        models = tuple(
            replace(
                each,
                engines=(TrainingEngine.fsdp,),
                given=Given({"offload_optimizer": True} if each.use.is_trained else {}),
            )
            for each in request.models
        )
        assert request.rollout is not None, "PPO generates"
        rollout = replace(request.rollout, given=Given({"tensor": tensor}))
        own = replace(request, models=models, rollout=rollout, placement=PlacementKind.given, pool_devices=pools)
        seconds = _seconds(replace(own, pinned={name: name for name in pools}))
        shown = f"{seconds:.0f} s" if seconds else "no fit"
        lines.append(_line(number, f"{model}, {sum(pools.values())} {table['device']}", f"{published} s", shown))
    lines += [f"  {why}" for why in table["why"]]
    return Section("OpenRLHF: seconds for 1,024 prompts", lines, [])


def _tail() -> Section:
    """The share of generation after nine tenths of the responses have ended."""
    table, published = _rows()["tail"], read("step_times.yaml")["verl"]
    lines = [f"  {table['assumed']}"]
    for row in (row for row in published["rows"] if row[0] in table["of"]):
        step = verl_step(row, published)
        quantiles = step.workload.responses.quantiles
        cut = quantiles[: -(len(quantiles) // 10)]
        shorter = replace(step.workload, responses=Lengths((*cut, *[cut[-1]] * (len(quantiles) // 10))))
        cluster = cluster_of(published["device"], step.training.num_devices, None)
        until, whole = (
            generation_seconds(step.rollout_use, step.rollout, work, cluster).total for work in (shorter, step.workload)
        )
        lines.append(
            _line(table["row"], f"the last 10% of the rows of {row[0]}", "up to 50%", f"{1 - until / whole:.0%}")
        )
    return Section("Seer: the tail of a rollout", [*lines, f"  {table['why']}"], [])


def _scaling() -> Section:
    """Strong scaling of the cells of one model: throughput on 128 devices by that on the fewest, per device."""
    found = []
    for model in dict.fromkeys(cell.actor for cell in cells() if cell.actor == cell.critic):
        sizes = [size for cell in cells() if cell.actor == cell.critic == model for size in cell.devices]
        seconds = {size: min(own.values()) for size in sizes if (own := predicted(model, model, size))}
        first, last = min(seconds), max(seconds)
        found.append((model, first, seconds[first] / seconds[last] / (last / first)))
    lines = [
        _line("P", f"{model}, {first} to 128 devices", f"{_PAPER_SCALING:.1%}", f"{efficiency:.1%}")
        for model, first, efficiency in found
    ]
    return Section(
        "HybridFlow: strong scaling of PPO (published: the mean of three algorithms and four sizes)", lines, []
    )


def _not_predicted() -> Section:
    lines = [f"  {number:>4} {label}: {why}" for number, label, why in _rows()["not_predicted"]]
    return Section("Published, and not predicted", lines, [])


def _seconds(request: Request) -> float:
    """Predicted seconds of the best plan; 0 if nothing fits."""
    plans = answer(request, num_plans=1).plans
    return plans[0].seconds if plans else 0.0


def _ppo_request(models: Mapping[str, str], workload: Workload, device: str, devices: int) -> Request:
    """PPO with these models of actor, reference, critic and reward."""
    planned = [
        PlannedModel(
            role,
            ModelUse(
                geometry_of(model),
                2,
                is_trained=role in ("actor", "critic"),
                has_language_head=role in ("actor", "reference"),
            ),
            _ENGINES,
        )
        for role, model in models.items()
    ]
    return Request(
        title="PPO",
        operations=ppo_operations(),
        models=tuple(planned),
        rollout=_rollout(planned[0].use),
        workload=workload,
        cluster=cluster_of(device, devices, None),
        minibatch_prompts=workload.rows // workload.optimizer_steps,
        batch_prompts=workload.rows,
    )


def _rollout(use: ModelUse) -> PlannedRollout:
    return PlannedRollout("rollout", "actor", replace(use, is_trained=False), RolloutKind.vllm)
