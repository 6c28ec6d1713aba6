"""The explanation of an answer agrees with the plan, and its changes are those that help most."""

import json
import re
from dataclasses import replace
from itertools import count
from xml.etree import ElementTree

import pytest

from hybridflow.config.placement import PlacementKind
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.candidates import Given
from hybridflow.mapping.changes import IN_HOST_MEMORY, sharding_problems
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.explanation import as_json, explain, step_facts
from hybridflow.mapping.explanation_text import CAUSES, WIDTH, text_of
from hybridflow.mapping.figure import svg_of
from hybridflow.mapping.layouts import ModelUse
from hybridflow.mapping.memory.phases import GIB
from hybridflow.mapping.memory.rollout import GENERATING
from hybridflow.mapping.operations import Operation, OperationKind
from hybridflow.mapping.planner import answer
from hybridflow.mapping.request import PlannedModel, PlannedRollout, Request
from hybridflow.mapping.timing.generation import cache_bytes_per_token
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import geometry_of, parameter_count

SIZES = {"1B": (2048, 16, 32, 8, 8192), "7B": (4096, 32, 32, 32, 11008), "70B": (8192, 80, 64, 8, 28672)}
SVG = "{http://www.w3.org/2000/svg}"


def ppo(size: str, cluster: str) -> Request:
    """PPO with four models of one size, which fsdp trains."""
    kinds = OperationKind
    hidden, layers, heads, kv_heads, inner = SIZES[size]
    geometry = geometry_of(
        {
            "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": 32000,
        }
    )  # fmt: skip
    operations = (
        Operation("rollout.generate", "rollout", kinds.generate, ()),
        Operation("reward.score", "reward", kinds.forward, (0,)),
        Operation("critic.values", "critic", kinds.forward, (0,)),
        Operation("reference.logprobs", "reference", kinds.forward, (0,)),
        Operation("actor.logprobs", "actor", kinds.forward, (0,)),
        Operation("driver.advantages", "driver", kinds.functions, (1, 2, 3, 4)),
        Operation("critic.update", "critic", kinds.update, (5,)),
        Operation("actor.update", "actor", kinds.update, (5,)),
        Operation("actor.publish", "rollout", kinds.publish, (6, 7)),
    )
    frozen, trained = ModelUse(geometry, 2, is_trained=False), ModelUse(geometry, 2, is_trained=True)
    uses = {
        "actor": trained,
        "critic": replace(trained, has_language_head=False),
        "reference": frozen,
        "reward": replace(frozen, has_language_head=False),
    }
    return Request(
        title="ppo",
        operations=operations,
        models=tuple(PlannedModel(role, use, (TrainingEngine.fsdp,)) for role, use in uses.items()),
        rollout=PlannedRollout("rollout", "actor", frozen, "vllm"),
        workload=Workload(256, Lengths.constant(512), Lengths.constant(512), 4),
        cluster=cluster_of(cluster),
        minibatch_prompts=64,
        batch_prompts=256,
    )


@pytest.fixture(scope="module")
def found():
    return answer(ppo("7B", "8xA100-80"))


@pytest.fixture(scope="module")
def impossible():
    return explain(answer(ppo("70B", "1xRTX-4090")))


def test_seconds_are_those_of_the_plan(found):
    for step in found.best_of_kind.values():
        facts = step_facts(step)
        assert facts.seconds == step.seconds == max(call.end_seconds for call in facts.calls)
        assert facts.tokens_per_second == pytest.approx(256 * 1024 / step.seconds)
        critical = sum(call.seconds for call in facts.calls if call.is_critical)
        assert critical == pytest.approx(step.seconds)
        for call in facts.calls:
            assert sum(call.parts_seconds.values()) == pytest.approx(call.seconds), call.name
            assert call.share == pytest.approx(call.seconds / step.seconds)
        for pool in facts.pools:
            busy = sum(call.seconds for call in facts.calls if call.pool == pool.name)
            assert pool.idle_fraction == pytest.approx(1 - busy / step.seconds)


def test_a_call_of_functions_takes_no_time_on_a_role_that_offloads_its_weights():
    request = ppo("1B", "2xH100")
    actor = replace(request.models[0], given=Given({"offload_parameters": 1}))
    of_actor = [replace(each, role="actor") if each.role == "driver" else each for each in request.operations]
    request = replace(request, operations=tuple(of_actor), models=(actor, *request.models[1:]))
    step = answer(request, num_plans=1).plans[0]
    starts, ends = step.plan.schedule.starts, step.plan.schedule.ends
    assert step.layouts["actor"].offload_parameters
    planned = [end - start for start, end in zip(starts, ends, strict=True)]
    assert planned == pytest.approx([seconds.total for seconds in step.operation_seconds()])
    assert planned[[each.name for each in request.operations].index("driver.advantages")] == 0


def test_memory_is_that_of_the_plan(found):
    device = found.request.cluster.device
    for step in found.best_of_kind.values():
        facts = step_facts(step)
        assert sum(pool.num_devices for pool in facts.pools) + facts.idle_devices == 8
        for planned, pool in zip(step.plan.pools, facts.pools, strict=True):
            options = planned.options.values()
            extra = max(option.extra_bytes for option in options)
            fullest = sum(option.resident_bytes for option in options) + extra + device.reserved_bytes
            assert max(phase.total_bytes for phase in pool.memory) == pytest.approx(fullest)
            for phase in pool.memory:
                assert sum(phase.parts_bytes.values()) == pytest.approx(phase.total_bytes)
                assert phase.free_bytes == pytest.approx(device.memory_bytes - phase.total_bytes)
                assert phase.free_bytes >= 0


def test_placements_are_the_best_ones_and_the_best_of_each_kind(found):
    placements = as_json(found)["placements"]
    assert [each["name"] for each in placements][:5] == [step.plan.name for step in found.plans]
    seconds = [each["seconds"] for each in placements]
    assert seconds == sorted(seconds)
    assert placements[0]["longer_seconds"] == 0
    for kind, step in found.best_of_kind.items():
        assert next(each["seconds"] for each in placements if kind in each["kinds"]) == step.seconds


def test_json_is_plain_data(found):
    explained = as_json(found)
    assert json.loads(json.dumps(explained)) == explained
    assert explained["fits"] is True
    assert explained["asked"]["parameters"]["actor"] == parameter_count(found.request.models[0].use.geometry)


def test_text_names_every_call_pool_and_placement(found):
    text = text_of(found)
    assert text.startswith("ppo on 8 x A100-80\n")
    assert "\n256 prompts x 1 response of up to 512 + 512 tokens, 512 + 512 on average\n" in text
    assert "It fits: a step takes about" in text
    for operation in found.request.operations:
        assert operation.name in text
    for step in found.plans:
        assert step.plan.name in text
    assert "Next best change: 16 x A100-80 instead of 8 saves about" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_no_more_responses_are_said_to_run_at_once_than_the_cache_holds(found):
    rollout = found.request.rollout
    work = replace(found.request.workload, rows=8192)
    request = replace(found.request, rollout=replace(rollout, memory_fraction=0.6), workload=work)
    step = answer(request, num_plans=1).plans[0]
    layout = step.layouts["rollout"]
    tokens = 512 + 256  # prompts, and responses half generated
    held = layout.cache_bytes / cache_bytes_per_token(rollout.use, layout) / tokens
    assert held < layout.max_sequences
    said = next(role.layout for pool in step_facts(step).pools for role in pool.roles if role.role == "rollout")
    assert said.endswith(f"{layout.max_sequences:,} responses at once at most, about {held:,.0f} in the KV cache")


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize("placement", [PlacementKind.colocated, PlacementKind.split])
def test_every_part_of_a_call_is_named_as_a_cause(engine, placement):
    request = ppo("1B", "8xA100-80")
    assert request.rollout is not None
    rollout = replace(request.rollout, engine=engine, captures_graphs=False)
    best = answer(replace(request, rollout=rollout, placement=placement)).plans[0]
    parts = {part for call in step_facts(best).calls for part in call.parts_seconds}
    assert {"launches", "transfer"} <= parts <= CAUSES.keys()


def test_the_next_best_change_is_the_best_of_all_single_changes():
    given = Given({"tensor": 4})
    free = ppo("7B", "8xA100-80")
    models = (replace(free.models[0], given=given), *free.models[1:])
    request = replace(free, models=models, placement=PlacementKind.standalone)
    tried = {
        "16 x A100-80 instead of 8": replace(request, cluster=cluster_of("2x8xA100-80")),
        "any placement instead of standalone": replace(request, placement=PlacementKind.auto),
        "any layout of actor instead of the given one": replace(request, models=free.models),
    }
    best = answer(request)
    seconds = {words: answer(each).plans[0].seconds for words, each in tried.items()}
    helps = {words: each for words, each in seconds.items() if each < 0.995 * best.plans[0].seconds}
    explained = explain(best)
    assert {each.change: each.seconds for each in explained.changes} == helps
    first = explained.changes[0]
    assert first.seconds == min(helps.values())
    assert first.saved_seconds == pytest.approx(best.plans[0].seconds - first.seconds)


def test_twice_the_devices_of_given_pools_are_divided_alike():
    free = ppo("1B", "8xA100-80")
    pinned = {role: "judges" if role in ("reward", "reference") else "main" for role in free.roles}
    pools = {"main": 6, "judges": 2}
    request = replace(free, placement=PlacementKind.given, pinned=pinned, pool_devices=pools)
    larger = replace(request, cluster=cluster_of("2x8xA100-80"), pool_devices={"main": 12, "judges": 4})
    changes = {each.change: each.seconds for each in explain(answer(request)).changes}
    assert changes["16 x A100-80 instead of 8"] == answer(larger).plans[0].seconds
    assert changes["any placement instead of the given one"] == answer(free).plans[0].seconds


def test_a_70b_model_on_one_card_needs_whole_nodes(impossible):
    assert not impossible.fits
    assert impossible.least_devices is not None
    least = impossible.least_devices.num_devices
    assert least % 8 == 0
    assert not answer(ppo("70B", f"{least - 8}xRTX-4090")).plans
    assert answer(ppo("70B", f"{least}xRTX-4090")).plans


def test_an_impossible_request_says_what_is_short(impossible):
    request = ppo("70B", "1xRTX-4090")
    weights = 2 * parameter_count(request.models[0].use.geometry)
    on_device = [need for need in impossible.needed if need.memory.name != IN_HOST_MEMORY]
    assert [need.roles for need in on_device] == [*([role] for role in request.roles), [*request.roles]]
    for need in impossible.needed:
        room = request.cluster.device.memory_bytes if need in on_device else request.cluster.offload_bytes
        assert need.memory.total_bytes > weights or need not in on_device
        assert need.memory.free_bytes == room - need.memory.total_bytes


def test_a_step_that_offloads_more_than_the_host_holds_does_not_fit():
    request = ppo("7B", "1xH200")
    (fits,) = answer(request, num_plans=1).plans
    offloaded = sum(fits.memory(role).host_bytes for role in request.roles)
    assert offloaded > 0
    for share, is_enough in ((1.01, True), (0.99, False)):
        host = share * offloaded / request.cluster.offload_bytes * request.cluster.host_bytes
        found = answer(replace(request, cluster=replace(request.cluster, host_bytes=host)), num_plans=1)
        assert bool(found.plans and found.plans[0].layouts == fits.layouts) == is_enough
        text = text_of(found)
        if not found.plans:
            assert "all together" in text and "in host memory" in text


def test_an_impossible_request_says_which_change_helps(impossible):
    fewest = [each.num_devices for each in impossible.changes]
    assert fewest == sorted(fewest)
    assert fewest[-1] < impossible.least_devices.num_devices
    lora = next(each for each in impossible.changes if each.change.startswith("LoRA of rank 16 for actor and critic"))
    request = ppo("70B", f"{lora.num_devices}xRTX-4090")
    models = [
        replace(each, use=replace(each.use, lora_rank=16)) if each.use.is_trained else each for each in request.models
    ]
    assert answer(replace(request, models=tuple(models))).plans[0].seconds == lora.seconds
    assert any(each.device != "RTX-4090" for each in impossible.changes)


def of_unknown_type(request: Request) -> Request:
    """The same request for models of a type whose weights no engine divides."""
    models = [
        replace(each, use=replace(each.use, geometry=replace(each.use.geometry, model_type="gpt_oss")))
        for each in request.models
    ]
    rollout = request.rollout
    assert rollout is not None
    own = replace(rollout, use=replace(rollout.use, geometry=models[0].use.geometry))
    return replace(request, models=tuple(models), rollout=own)


def test_engines_that_cannot_shard_the_model_are_named():
    request = of_unknown_type(ppo("70B", "1xRTX-4090"))
    assert sharding_problems(ppo("70B", "1xRTX-4090")) == []
    (problem,) = sharding_problems(request)
    assert problem.startswith("vllm (rollout): divides models of the types llama, ")
    assert problem.endswith("; this one is of type gpt_oss")
    megatron = tuple(replace(each, engines=(TrainingEngine.megatron,)) for each in request.models[:2])
    problems = sharding_problems(replace(request, models=megatron))
    assert [each.partition(":")[0] for each in problems] == ["megatron (actor, critic)", "vllm (rollout)"]


def test_roles_without_any_layout_are_no_empty_table():
    free = of_unknown_type(ppo("70B", "1xRTX-4090"))
    actor = replace(free.models[0], engines=(TrainingEngine.megatron,))
    text = text_of(
        answer(replace(free, models=(actor,), rollout=None, operations=(replace(free.operations[4], needs=()),)))
    )
    assert "It does not fit. No role has a layout.\n" in text
    assert "GiB" not in text
    assert "  megatron (actor): divides models of the types llama, " in text


def test_sizes_that_do_not_divide_the_model_are_named():
    request = ppo("7B", "8xH100")
    actor = replace(request.models[0], given=Given({"tensor": 3}))
    problems = sharding_problems(replace(request, models=(actor, *request.models[1:])))
    assert problems == ["fsdp (actor): parallelism.tensor=3 does not divide the model's 32 attention heads"]


def test_the_smallest_number_of_devices_within_a_node():
    request = ppo("7B", "1xA100-40")
    fits = next(number for number in count(1) if answer(ppo("7B", f"{number}xA100-40")).plans)
    found = answer(request)
    assert 1 < fits <= 8
    assert explain(found).least_devices.num_devices == fits
    text = text_of(found)
    assert f"The smallest number of A100-40 that fits: {fits}," in text
    assert "The single change that helps most: " in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("kind", ["colocated", "split", "standalone"])
def test_the_figure_draws_every_call_and_phase(found, kind):
    step = found.best_of_kind[kind]
    page = ElementTree.fromstring(svg_of(step))
    titles = [each.text for each in page.iter(f"{SVG}title")]
    words = [each.text for each in page.iter(f"{SVG}text")]
    facts = step_facts(step)
    for call in facts.calls:
        assert any(title.startswith(f"{call.name}: ") for title in titles) == (call.seconds > 0)
    for pool in facts.pools:
        for phase in pool.memory:
            assert phase.name in words
            assert any(word and word.startswith(f"{phase.total_bytes / 2**30:.1f} GiB, ") for word in words)


def test_the_figure_stacks_memory_to_scale(found):
    page = ElementTree.fromstring(svg_of(found.plans[0]))
    (pool,) = step_facts(found.plans[0]).pools
    card = next(each for each in page.iter(f"{SVG}rect") if each.get("class") == "full")
    own = [each for each in page.iter(f"{SVG}rect") if each.get("y") == card.get("y") and len(each)]
    share = sum(float(each.get("width")) for each in own) / float(card.get("width"))
    device = found.request.cluster.device
    assert share == pytest.approx(pool.memory[0].total_bytes / device.memory_bytes, abs=0.002)


def test_every_color_of_the_figure_is_defined(found):
    page = svg_of(found.plans[0])
    used = set(re.findall(r'class="(f\d+)', page))
    assert {"f5", "f0"} <= used
    assert used <= set(re.findall(r"\.(f\d+) \{ fill:", page))


def test_the_figure_escapes_text(found):
    step = replace(found.plans[0], request=replace(found.request, title="<script>&\x1b"))
    page = ElementTree.fromstring(svg_of(step))
    assert page.find(f"{SVG}title").text == "<script>&\\x1b on 8 x A100-80"


def test_a_cpu_offloads_nothing():
    request = ppo("1B", "8xcpu")
    given = Given({"offload_parameters": True, "offload_optimizer": True})
    models = tuple(replace(model, given=given) for model in request.models)
    plain, offloading = (answer(each, num_plans=1).plans for each in (request, replace(request, models=models)))
    assert [each.seconds for each in offloading] == [each.seconds for each in plain]
    assert all(each.memory(role).host_bytes == 0 for each in (*plain, *offloading) for role in request.roles)


@pytest.mark.parametrize("cluster", ["16xH100", "2x4xH100"])
def test_a_transfer_between_pools_takes_the_seconds_of_its_own_devices(cluster):
    request = ppo("1B", cluster)
    found = answer(replace(request, placement=PlacementKind.standalone), num_plans=20)
    for step in found.plans:
        each = [part.total for part in step.operation_seconds()]
        times = step.plan.schedule
        assert [end - start for start, end in zip(times.starts, times.ends, strict=True)] == pytest.approx(each)
        publish = next(at for at, op in enumerate(request.operations) if op.kind is OperationKind.publish)
        options = {unit: own for pool in step.plan.pools for unit, own in pool.options.items()}
        option = options.get(("rollout",))  # in a pool of its own
        assert option is None or option.seconds[-1] <= each[publish] * (1 + 1e-9), "the search has a lower bound"
    assert [step.seconds for step in found.plans] == sorted(step.seconds for step in found.plans)


def test_a_plan_with_hardly_any_free_memory_says_so(found):
    facts = step_facts(found.plans[0])
    phase = facts.pools[0].memory[-1]
    assert phase.name != GENERATING
    tight = replace(phase, total_bytes=80 * GIB, free_bytes=0.4 * GIB)
    roomy = replace(phase, total_bytes=70 * GIB, free_bytes=10 * GIB)
    pools = [replace(facts.pools[0], memory=[roomy, tight, replace(tight, name=GENERATING)])]
    assert replace(facts, pools=pools).tight_phases == [tight]
