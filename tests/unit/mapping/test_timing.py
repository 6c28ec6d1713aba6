"""Seconds of training, generation and transfers: cases computed by hand, and what must hold for every layout."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.layouts import fsdp, megatron, rollout
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.systems import optimizer_bytes
from hybridflow.mapping.timing.generation import generation_seconds
from hybridflow.mapping.timing.rates import Group, Rates
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.training import forward_seconds, update_seconds
from hybridflow.mapping.timing.transfers import Transition, batch_seconds, publish_seconds
from hybridflow.mapping.timing.work import active_parameters, forward_flops
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import geometry_of, parameter_count
from hybridflow.parallel import ParallelMesh
from hybridflow.resharding.grouping import generation_mesh
from hybridflow.resharding.plan import make_plan
from tests.unit.mapping.clusters import CLUSTER, EXACT, WORKLOAD, dense, mixture

MEGATRON = TrainingLayout(engine=TrainingEngine.megatron, gradient_checkpointing=False)
FSDP = replace(MEGATRON, engine=TrainingEngine.fsdp)
LAYOUTS = {
    "one device": MEGATRON,
    "fsdp": replace(FSDP, data=32, microbatch_tokens=1024),
    "hsdp": replace(FSDP, data=32, replicas=4, sequence=2),
    "tensor": replace(MEGATRON, data=4, tensor=8, sequence_parallel=True),
    "pipeline": replace(MEGATRON, data=4, pipeline=4, tensor=2, gradient_checkpointing=True),
    "experts": replace(MEGATRON, data=32, expert=16),
    "sequence": replace(MEGATRON, data=4, sequence=8),
    "offloaded": replace(MEGATRON, data=32, offload_parameters=True, offload_optimizer=True),
}
NODE, NETWORK = 0.8 * CLUSTER.node_link, 0.9 * CLUSTER.network_link
"""What transfers reach of the links' rates."""

DENSE = ModelUse(dense(), 2, is_trained=True)
MIXTURE = ModelUse(mixture(), 2, is_trained=True)


def llama_70b() -> ModelUse:
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    return ModelUse(geometry_of({**sizes, "intermediate_size": 28672, "vocab_size": 32000}), 2, is_trained=True)


def slower(cluster: Cluster, **rates: float) -> Cluster:
    """The cluster with each of the named rates divided by 3."""
    own = {name: getattr(cluster, name) / 3 for name in rates if hasattr(cluster, name)}
    device = {name: getattr(cluster.device, name) / 3 for name in rates if name not in own}
    return replace(cluster, device=replace(cluster.device, **device), **own)


def operations(use: ModelUse, layout: TrainingLayout) -> dict[str, Callable[[Cluster], Seconds]]:
    """Everything that takes time in a step of this layout."""
    rollout = RolloutLayout(engine="vllm", replicas=layout.num_devices, max_sequences=4)
    calls: dict[str, Callable[[Cluster], Seconds]] = {
        "forward": lambda cluster: forward_seconds(use, layout, WORKLOAD, cluster),
        "update": lambda cluster: update_seconds(use, layout, WORKLOAD, cluster),
        "generate": lambda cluster: generation_seconds(use, rollout, WORKLOAD, cluster),
    }
    for transition in Transition:
        calls[transition.value] = lambda cluster, t=transition: publish_seconds(use, layout, rollout, cluster, t)
    return calls


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rate", ["matrix_flops", "memory_bandwidth", "node_link", "network_link", "host_link"])
def test_a_slower_rate_never_saves_time(name: str, rate: str):
    layout = LAYOUTS[name]
    use = MIXTURE if layout.expert > 1 else DENSE
    changed = False
    for call in operations(use, layout).values():
        before, after = call(CLUSTER).total, call(slower(CLUSTER, **{rate: 3.0})).total
        assert after >= before
        changed |= after > before
    assert (
        changed
        or rate == "host_link"
        or (rate == "network_link" and layout.num_devices <= 8)
        or (rate == "node_link" and layout.num_devices == 1)
    )


def test_every_synchronization_adds_time():
    late = replace(CLUSTER, device=replace(CLUSTER.device, efficiency=replace(EXACT, sync_seconds=1e-4)))
    for layout in LAYOUTS.values():
        calls = operations(MIXTURE if layout.expert > 1 else DENSE, layout)
        for name in ("forward", "update", "generate"):
            assert calls[name](late).total > calls[name](CLUSTER).total


def test_data_parallelism_divides_the_computation_of_balanced_rows():
    workload = Workload(512, Lengths.constant(512), Lengths.constant(512), optimizer_steps=1)
    one = update_seconds(DENSE, replace(MEGATRON, distributed_optimizer=False), workload, CLUSTER)
    for data in (2, 8, 64):
        many = update_seconds(DENSE, replace(MEGATRON, data=data, distributed_optimizer=False), workload, CLUSTER)
        assert many.parts["matrix"] * data == pytest.approx(one.parts["matrix"])
        assert many.parts["memory"] * data == pytest.approx(one.parts["memory"])
        assert many.parts["optimizer"] == pytest.approx(one.parts["optimizer"])


def test_a_prompt_counts_once_for_the_samples_that_fit_into_a_microbatch():
    apart = Workload(256, Lengths.constant(1024), Lengths.constant(128), optimizer_steps=1)
    shared = replace(apart, shared_by=8)

    def operations_of(workload: Workload, microbatch_tokens: int) -> float:
        layout = replace(MEGATRON, microbatch_tokens=microbatch_tokens)
        return forward_seconds(DENSE, layout, workload, CLUSTER).parts["matrix"] * 1e15

    eight, two = (
        256 / samples * forward_flops(DENSE, 1024 + samples * 128, 1024**2 + samples * (1152**2 - 1024**2))
        for samples in (8, 2)
    )
    assert operations_of(apart, 8192) == pytest.approx(256 * forward_flops(DENSE, 1152, 1152**2))
    assert operations_of(shared, 8192) == pytest.approx(eight)
    assert operations_of(shared, 1024 + 2 * 128) == pytest.approx(two)


def test_every_way_to_divide_a_model_keeps_its_floating_point_operations():
    workload = Workload(256, Lengths.constant(512), Lengths.constant(512), optimizer_steps=1)
    expected = 256 * forward_flops(DENSE, 1024, 1024**2) / 1e15
    for layout in LAYOUTS.values():
        if layout.pipeline > 1:  # its last stage has more, and decides
            continue
        found = forward_seconds(DENSE, replace(layout, expert=1), workload, CLUSTER)
        assert found.parts["matrix"] * layout.num_devices == pytest.approx(expected)


def test_flops_of_a_dense_model_are_two_per_parameter_and_token_with_causal_attention():
    layer = 1024 * (2 * 1024 + 2 * 256) + 3 * 1024 * 4096
    assert active_parameters(dense()) == 8 * layer
    expected = 2 * 100 * (8 * layer + 1024 * 32000) + 8 * 100**2 * (1024 + 1024)
    assert forward_flops(DENSE, 100, 100**2) == expected
    no_head = replace(DENSE, has_language_head=False)
    assert expected - forward_flops(no_head, 100, 100**2) == 2 * 100 * 1024 * 32000


def test_linear_attention_does_not_grow_with_the_square_of_lengths():
    hybrid = replace(DENSE, geometry=replace(dense(), linear_layers=6))
    growth = [forward_flops(use, 0, 100**2) for use in (DENSE, hybrid)]
    assert growth[1] == growth[0] * 2 / 8


def test_a_token_passes_only_its_experts():
    attention, router, expert = 1024 * (2 * 1024 + 2 * 256), 16 * 1024, 3 * 1024 * 512
    assert active_parameters(mixture()) == 8 * (attention + router + 2 * expert)


def test_attention_counts_each_packed_row_and_not_the_whole_microbatch():
    short = Workload(64, Lengths.constant(64), Lengths.constant(64), optimizer_steps=1)
    long = Workload(1, Lengths.constant(64 * 64), Lengths.constant(64 * 64), optimizer_steps=1)
    difference = forward_seconds(DENSE, MEGATRON, long, CLUSTER).parts["matrix"]
    difference -= forward_seconds(DENSE, MEGATRON, short, CLUSTER).parts["matrix"]
    assert difference == pytest.approx(8 * 2048 * (8192**2 - 64 * 128**2) / 1e15)


def test_backward_takes_two_forward_passes_and_recomputation_one_more():
    forward = forward_seconds(DENSE, MEGATRON, WORKLOAD, CLUSTER).parts["matrix"]
    whole = replace(WORKLOAD, optimizer_steps=1)
    plain = update_seconds(DENSE, MEGATRON, whole, CLUSTER).parts["matrix"]
    again = update_seconds(DENSE, replace(MEGATRON, gradient_checkpointing=True), whole, CLUSTER).parts["matrix"]
    assert (plain / forward, again / forward) == (pytest.approx(3), pytest.approx(4))


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_bubbles_are_those_of_interleaved_1f1b(stages: int, virtual: int):
    workload = Workload(16, Lengths.constant(512), Lengths.constant(512), optimizer_steps=1)
    layout = replace(MEGATRON, pipeline=stages, virtual_pipeline=virtual, microbatch_tokens=1024)
    parts = forward_seconds(DENSE, layout, workload, CLUSTER).parts
    work = sum(parts.values()) - parts["bubbles"]
    assert parts["bubbles"] / work == pytest.approx((stages - 1) / (16 * virtual))


def test_the_last_of_equal_stages_also_computes_the_language_head():
    workload = Workload(16, Lengths.constant(512), Lengths.constant(512), optimizer_steps=1)
    layout = replace(MEGATRON, pipeline=4)
    head = 2 * 1024 * 32000 * 16 * 1024 / 1e15
    whole = forward_seconds(DENSE, MEGATRON, workload, CLUSTER).parts["matrix"]
    last = forward_seconds(DENSE, layout, workload, CLUSTER).parts["matrix"]
    assert last == pytest.approx((whole - head) / 4 + head)
    uneven = replace(DENSE, geometry=replace(dense(), layers=9))
    whole = forward_seconds(uneven, MEGATRON, workload, CLUSTER).parts["matrix"]
    assert forward_seconds(uneven, layout, workload, CLUSTER).parts["matrix"] == pytest.approx(whole / 4)


def test_virtual_stages_send_activations_more_often_and_need_a_multiple_of_the_stages():
    workload = Workload(6, Lengths.constant(512), Lengths.constant(512), optimizer_steps=1)
    late = replace(CLUSTER, device=replace(CLUSTER.device, efficiency=replace(EXACT, sync_seconds=1.0)))
    layout = replace(MEGATRON, pipeline=4, microbatch_tokens=1024)
    plain = forward_seconds(DENSE, layout, workload, late).parts
    interleaved = forward_seconds(DENSE, replace(layout, virtual_pipeline=2), workload, late).parts
    assert plain["latency"] == 6 * (8 / 4 + 1)
    assert interleaved["latency"] == 8 * (8 / 4 + 1)
    assert interleaved["stages"] == pytest.approx(2 * 8 / 6 * plain["stages"], rel=1e-3)


def test_a_host_without_cuda_graphs_launches_each_layer():
    rollout = RolloutLayout(engine="vllm", max_sequences=4)
    workload = Workload(1, Lengths.constant(8), Lengths.constant(100), optimizer_steps=1)
    graphs = generation_seconds(DENSE, rollout, workload, CLUSTER)
    eager = generation_seconds(DENSE, replace(rollout, captures_graphs=False), workload, CLUSTER)
    prefill = eager.parts["prefill"]
    assert eager.total - prefill == pytest.approx(100 * 8 * 22.5e-3 / 28)
    assert graphs.parts["launches"] == 0.0
    on_cpu = replace(CLUSTER, device=replace(CLUSTER.device, cores=2))
    eager = generation_seconds(DENSE, replace(rollout, captures_graphs=False), workload, on_cpu)
    assert eager.parts["launches"] == 0.0


def test_rows_longer_than_half_the_budget_do_not_share_a_microbatch():
    workload = Workload(100, Lengths.constant(600), Lengths.constant(600), optimizer_steps=1)
    late = replace(CLUSTER, device=replace(CLUSTER.device, efficiency=replace(EXACT, sync_seconds=1.0)))
    apart = forward_seconds(DENSE, replace(MEGATRON, microbatch_tokens=2048), workload, late)
    together = forward_seconds(DENSE, replace(MEGATRON, microbatch_tokens=2400), workload, late)
    assert (apart.parts["latency"], together.parts["latency"]) == (100 * 9, 50 * 9)


def test_gathers_of_fsdp_are_hidden_behind_computation():
    gathered = 2 * (8 * (1024 * 2560 + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 2 * 32000 * 1024)
    layout = replace(FSDP, data=8)
    rows = Workload(8, Lengths.constant(4), Lengths.constant(4), optimizer_steps=1)
    parts = forward_seconds(DENSE, layout, rows, CLUSTER).parts
    assert parts["gathers"] + parts["matrix"] + parts["memory"] == pytest.approx(gathered * 7 / 8 / NODE)
    long = Workload(800, Lengths.constant(4096), Lengths.constant(4096), optimizer_steps=1)
    assert forward_seconds(DENSE, layout, long, CLUSTER).parts["gathers"] == 0.0


def test_collectives_between_nodes_share_the_links_of_their_node():
    rates = Rates(CLUSTER, 2)
    assert rates.all_gather(8e9, Group(8)) == pytest.approx(7e9 / NODE)
    assert rates.all_gather(16e9, Group(16)) == pytest.approx(15e9 / NODE)
    assert Rates(replace(CLUSTER, network_link=5e9), 2).all_gather(16e9, Group(16)) == pytest.approx(8e9 / 36e9)
    assert rates.all_gather(8e9, Group(8, stride=8)) == pytest.approx(7e9 / NETWORK)
    assert rates.all_reduce(8e9, Group(8)) == pytest.approx(2 * 7e9 / NODE)
    assert rates.all_to_all(16e9, Group(16)) == pytest.approx(8e9 / NETWORK)
    assert rates.all_gather(8e9, Group(1)) == 0.0


def test_a_micro_data_group_gathers_the_bytes_of_table_2():
    paper = replace(CLUSTER, num_devices=128, network_link=25e9 / 8)
    use = llama_70b()
    training = replace(MEGATRON, data=2, pipeline=8, tensor=8)
    rollout = RolloutLayout(engine="vllm", replicas=16, tensor=8)
    seconds = publish_seconds(use, training, rollout, paper, Transition.micro_data).total
    # (d_g - 1) / (t p) M = 7 / 64 of the weights, over an eighth of the node's 25 GB/s
    weights = 2 * (80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672 + 2 * 8192) + 8192 + 2 * 32000 * 8192)
    assert seconds == pytest.approx(7 / 64 * weights / (0.9 * 25e9 / 8))
    assert seconds == pytest.approx(4.9 / 0.9, abs=0.1)
    same = replace(training, pipeline=1, data=16)
    assert publish_seconds(use, same, rollout, paper, Transition.micro_data).total == 0.0


@pytest.mark.parametrize(("ranks", "tensor"), [(8, 1), (16, 1), (16, 2), (32, 8)])
def test_fsdp_publishes_the_bytes_that_the_transfer_plan_moves(ranks: int, tensor: int):
    mesh = ParallelMesh({"data": ranks, "pipeline": 1, "sequence": 1, "tensor": 1})
    wanted = rollout(dense(), generation_mesh(mesh, copies=1, tensor=tensor, pipeline=1, devices_per_node=8))
    held = fsdp(dense(), ranks)
    plan = make_plan([held(rank) for rank in range(ranks)], [wanted(rank) for rank in range(ranks)])
    layouts = replace(FSDP, data=ranks), RolloutLayout(engine="vllm", replicas=ranks // tensor, tensor=tensor)
    found = publish_seconds(DENSE, *layouts, CLUSTER, Transition.micro_data).total
    if tensor == 1:  # a gather, whose bytes enter each node once: the links within nodes take longer
        assert found == pytest.approx(plan.bytes_received(0) / NODE, rel=1e-3)
    else:
        moved = [piece for rank in range(8) for piece in plan.received_by(rank) if piece.source >= 8]
        # norms are not divided by tensor parallelism
        assert found == pytest.approx(sum(piece.nbytes for piece in moved) / 8 / NETWORK, rel=0.03)


@pytest.mark.parametrize(("expert", "tensor"), [(4, 1), (4, 2), (8, 4), (8, 8)])
def test_experts_are_published_with_the_bytes_that_the_transfer_plan_moves(expert: int, tensor: int):
    mesh = ParallelMesh({"data": 8, "pipeline": 1, "sequence": 1, "tensor": 1})
    wanted = rollout(mixture(), generation_mesh(mesh, copies=1, tensor=tensor, pipeline=1, devices_per_node=8))
    held = megatron(mixture(), mesh, expert=expert)
    plan = make_plan([held(rank) for rank in range(8)], [wanted(rank) for rank in range(8)])
    layouts = (
        replace(MEGATRON, data=8, expert=expert),
        RolloutLayout(engine="vllm", replicas=8 // tensor, tensor=tensor),
    )
    found = publish_seconds(MIXTURE, *layouts, CLUSTER, Transition.micro_data).total
    assert found == pytest.approx(max(map(plan.bytes_received, range(8))) / NODE, rel=0.05)


def test_generation_with_more_shards_than_training_receives_weights():
    training, rollout = replace(MEGATRON, data=4, tensor=2), RolloutLayout(engine="vllm", replicas=2, tensor=4)
    weights = 2 * (8 * (1024 * 2560 + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 2 * 32000 * 1024)
    seconds = publish_seconds(DENSE, training, rollout, CLUSTER, Transition.micro_data).total
    assert seconds == pytest.approx(weights / 4 * 3 / 4 / NODE)
    alone = replace(training, data=8, tensor=1)
    assert publish_seconds(DENSE, alone, rollout, CLUSTER, Transition.micro_data).total == 0.0


def test_whole_tensors_are_gathered_and_sent_one_by_one():
    late = replace(CLUSTER, device=replace(CLUSTER.device, efficiency=replace(EXACT, sync_seconds=1.0)))
    layouts = replace(FSDP, data=16), RolloutLayout(engine="vllm", replicas=16, is_colocated=False)
    parts = publish_seconds(MIXTURE, *layouts, late, Transition.per_tensor).parts
    assert parts["latency"] == 2 * (3 + 8 * (9 + 3 * 16))
    assert parts["gathers"] > 0 and parts["transfer"] > 0


def test_a_separate_rollout_waits_for_the_busier_side():
    training = replace(MEGATRON, data=4)
    many = RolloutLayout(engine="vllm", replicas=16, is_colocated=False)
    few = RolloutLayout(engine="vllm", replicas=2, is_colocated=False)
    weights = 2 * (8 * (1024 * 2560 + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 2 * 32000 * 1024)
    assert publish_seconds(DENSE, training, many, CLUSTER, Transition.send_recv).total == pytest.approx(
        4 * weights / NETWORK
    )
    assert publish_seconds(DENSE, training, few, CLUSTER, Transition.send_recv).total == pytest.approx(weights / NODE)


def test_batches_take_their_bytes():
    one_node = replace(CLUSTER, num_devices=8)
    assert batch_seconds(1e6, 4, one_node) == pytest.approx(24e6 / 4 / (0.8 * CLUSTER.host_link))
    assert batch_seconds(1e6, 4, CLUSTER) == pytest.approx(24e6 / 4 / NETWORK)


def test_fsdp_reduces_gradients_in_float32_and_passes_every_node():
    """Where computation hides nothing, on the slowest network, the gathers are the bytes and the hops."""
    slow = replace(CLUSTER, network_link=1e6)
    layout = TrainingLayout(engine=TrainingEngine.fsdp, data=64, microbatch_tokens=16384)
    one_step = replace(WORKLOAD, optimizer_steps=1, rows=64)
    parameters = parameter_count(DENSE.geometry)

    def gathers(use: ModelUse) -> float:
        return update_seconds(use, layout, one_step, slow).parts["gathers"]

    by_byte = parameters * 7 / 8 / 8 / (0.9 * 1e6)
    hidden = update_seconds(DENSE, layout, one_step, slow).parts
    hops = 3 * 8 * 7 * (4e-6 + 7 * 1.9e-6)
    busy = hidden["matrix"] + hidden["memory"]
    assert gathers(DENSE) == pytest.approx((2 * 2 + 4) * by_byte + hops - busy, rel=0.01)
    assert Rates(CLUSTER, 2).hops(Group(8)) == 0
    assert Rates(CLUSTER, 2).hops(Group(64)) == pytest.approx(7 * (4e-6 + 7 * 1.9e-6))


def test_state_in_float32_has_no_second_copy_of_the_weights():
    assert (optimizer_bytes(4), optimizer_bytes(2)) == (8, 12)
    layout = TrainingLayout(engine=TrainingEngine.single, offload_optimizer=True)
    full = replace(DENSE, value_bytes=4)
    moved = [update_seconds(use, layout, WORKLOAD, CLUSTER).parts["offload"] for use in (full, DENSE)]
    assert moved[0] / moved[1] == pytest.approx(8 / 12)


@pytest.mark.parametrize(("mean", "longest"), [(1000, 8000), (3200, 4096), (1024, 28672), (4096, 4096), (0.5, 0.5)])
def test_a_spread_distribution_has_its_mean_and_its_longest_row(mean: float, longest: float):
    lengths = Lengths.spread(mean, longest)
    assert lengths.mean == pytest.approx(mean)
    assert lengths.longest == longest
    assert list(lengths.quantiles) == sorted(lengths.quantiles)


def test_the_longest_row_of_a_spread_distribution_leaves_the_others_at_least_one_token():
    assert Lengths.spread(20, 28672).quantiles == (*[1.0] * 255, 28672)


def test_the_99th_percentile_of_a_spread_distribution_is_ten_times_the_median():
    quantiles = Lengths.spread(50_000, 1e6).quantiles
    assert quantiles[253] / quantiles[127] == pytest.approx(10, rel=0.06)  # the quantiles at 0.990 and 0.498
