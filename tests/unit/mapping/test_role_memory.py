"""The memory of roles: sums by hand, and what must hold for every model and layout."""

import itertools
from dataclasses import replace

import pytest

from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Device, Efficiency
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.activations import Microbatches
from hybridflow.mapping.memory.phases import ENGINES, RoleMemory, colocated_phases
from hybridflow.mapping.memory.rollout import full_cache_bytes, rollout_memory
from hybridflow.mapping.memory.training import training_memory
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import geometry_of, parameter_count, parameter_split

FSDP, MEGATRON = TrainingEngine.fsdp, TrainingEngine.megatron
DENSE = geometry_of(
    {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    }
)  # fmt: skip
EXPERTS = geometry_of(
    {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    }
)  # fmt: skip
LATENT = geometry_of(
    {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }
)  # fmt: skip
MODELS = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT}
LAYOUTS = {
    "fsdp": TrainingLayout(engine=FSDP, data=16),
    "fsdp ulysses": TrainingLayout(engine=FSDP, data=4, sequence=4),
    "fsdp replicas": TrainingLayout(engine=FSDP, data=16, replicas=2),
    "megatron": TrainingLayout(engine=MEGATRON, data=4, tensor=4),
    "megatron stages": TrainingLayout(engine=MEGATRON, data=2, tensor=2, pipeline=4, sequence_parallel=True),
    "megatron experts": TrainingLayout(engine=MEGATRON, data=8, pipeline=2, expert=8),
}
WORKLOAD = Workload(1024, Lengths((1024.0,)), Lengths((1024.0,)), 4)
LAYER = 3584 * (3584 + 2 * 512 + 3584 + 3 * 18944) + 3584 + 2 * 512 + 2 * 3584


def trained(
    geometry=DENSE, layout=LAYOUTS["fsdp"], *, workload: Workload = WORKLOAD, has_host=True, **use
) -> RoleMemory:
    use = replace(ModelUse(geometry, 2, is_trained=True), **use)
    return training_memory("actor", use, layout, workload, has_host=has_host)


def total(role: RoleMemory) -> float:
    return role.resident_bytes + role.extra_bytes


@pytest.fixture(params=itertools.product(MODELS, LAYOUTS), ids=" ".join)
def case(request):
    """Each model on each layout."""
    model, layout = request.param
    return MODELS[model], LAYOUTS[layout]


def test_fsdp_divides_weights_gradients_and_optimizer_by_all_devices():
    role, count = trained(layout=TrainingLayout(engine=FSDP, data=8)), parameter_count(DENSE)
    assert role.resident == {"weights of actor": 2 * count / 8, "optimizer of actor": 12 * count / 8}
    updating = role.phases["updating actor"]
    assert updating["gradients"] == 4 * count / 8
    embeddings = 2 * 152064 * 3584
    assert updating["gathered layers"] == pytest.approx(2 * (2 * LAYER + embeddings), rel=1e-6)
    assert updating["gradients being reduced"] == pytest.approx(6 * LAYER + 2 * embeddings, rel=1e-6)


def test_activations_are_the_inputs_of_all_layers_and_one_layer_with_its_gradients():
    layer = (8 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18944) + (5 * 3584 + 3 * 3584 + 3 * 512 + 3 * 18944)
    assert trained().phases["updating actor"]["activations"] == 8192 * 2 * (28 * 3584 + layer)
    kept = 8 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18944
    whole = trained(layout=replace(LAYOUTS["fsdp"], gradient_checkpointing=False))
    assert whole.phases["updating actor"]["activations"] == 8192 * 2 * (28 * kept + layer - kept)


def test_a_routed_token_is_copied_to_each_of_its_experts():
    widest = trained(EXPERTS, replace(LAYOUTS["fsdp"], gradient_checkpointing=False)).phases["updating actor"]
    copies = 8 * (2 * 2048 + 4 * 768)
    attention = 8 * 2048 + (2 + 3) * 4096 + (2 + 3) * 512
    gradients = 8 * (2 * 2048 + 3 * 768) + 5 * 2048 + 3 * 4096 + 3 * 512
    assert widest["activations"] == 8192 * 2 * (48 * (copies + attention) + gradients)


def test_stages_keep_a_microbatch_each():
    inputs = 8192 * 2 * 3584
    stages = TrainingLayout(engine=MEGATRON, pipeline=4, distributed_optimizer=False)
    layer = trained(layout=stages).phases["updating actor"]["activations"] - 7 * 4 * inputs
    alone = trained(layout=stages, workload=replace(WORKLOAD, rows=4, optimizer_steps=1))
    assert alone.phases["updating actor"]["activations"] == pytest.approx(7 * inputs + layer)
    interleaved = trained(layout=replace(stages, virtual_pipeline=7)).phases["updating actor"]["activations"]
    assert interleaved == pytest.approx(7 * (4 + 3 / 7) * inputs + layer)


def test_the_distributed_optimizer_divides_the_state_of_each_kind_of_weight_by_its_copies():
    layout = TrainingLayout(engine=MEGATRON, data=16, tensor=2, expert=8)
    role, split = trained(EXPERTS, layout), parameter_split(EXPERTS)
    dense, routed = (split.total - split.routed) / 2, split.routed / 16
    assert role.resident["weights of actor"] == 2 * (dense + routed)
    assert role.resident["optimizer of actor"] == pytest.approx(12 * (dense / 16 + routed / 2))
    whole = trained(EXPERTS, replace(layout, distributed_optimizer=False))
    assert whole.resident["optimizer of actor"] == pytest.approx(12 * (dense + routed))


def test_an_offloaded_part_is_in_host_memory_and_on_the_device_while_it_is_needed():
    plain = trained()
    role = trained(layout=replace(LAYOUTS["fsdp"], offload_optimizer=True, offload_parameters=True))
    assert role.host == plain.resident
    assert role.resident_bytes == 0
    assert role.phases["updating actor"]["weights of actor"] == plain.resident["weights of actor"]
    assert role.phases["updating actor"]["optimizer buckets"] == 3 * 256 << 20


def test_an_adapter_is_all_that_lora_trains():
    rank, layer = 16, 2 * 3584 + 2 * (3584 + 512) + 2 * 3584 + 3 * (3584 + 18944)
    role = trained(lora_rank=rank, layout=TrainingLayout(engine=FSDP, data=1))
    assert role.resident["optimizer of actor"] == 12 * 28 * rank * layer
    assert role.resident["weights of actor"] == 2 * (parameter_count(DENSE) + 28 * rank * layer)
    assert "gathered layers" not in role.phases["updating actor"], "one device gathers nothing"


def test_a_frozen_model_needs_no_state_and_a_model_without_a_head_no_logits():
    frozen = trained(is_trained=False)
    assert frozen.phases.keys() == {"running actor"} and frozen.resident.keys() == {"weights of actor"}
    long = Workload(1, Lengths((0.0,)), Lengths((8192.0,)), 1)
    alone = TrainingLayout(engine=FSDP)
    small = geometry_of(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 32000,
        }
    )
    assert trained(small, alone, workload=long, is_trained=False).phases["running actor"]["logits"] == 8192 * 32000 * 12
    headless = trained(small, alone, workload=long, is_trained=False, has_language_head=False)
    assert "logits" not in headless.phases["running actor"]


def test_a_copy_of_the_state_exists_twice_while_it_is_stored():
    plain, copied, in_host = trained(), trained(copies_state=True, has_host=False), trained(copies_state=True)
    state = plain.resident["weights of actor"] + plain.resident["optimizer of actor"]
    assert copied.phases["copying actor"]["copies of actor"] == in_host.host["copies of actor"] == 2 * state
    assert (in_host.resident, in_host.phases) == (plain.resident, plain.phases)
    assert copied.phases["updating actor"] == plain.phases["updating actor"]
    assert copied.resident == plain.resident
    assert copied.extra_bytes == max(sum(parts.values()) for parts in copied.phases.values())


def test_weights_that_a_rollout_shares_count_there():
    use = ModelUse(DENSE, 2, is_trained=True)
    layout = replace(LAYOUTS["fsdp"], offload_parameters=True)
    role = training_memory("actor", use, layout, WORKLOAD, shares_weights=True)
    assert role.resident["weights of actor"] == 0 and not role.host


def test_tensor_parallelism_divides_weights(case):
    geometry, layout = case
    halves = trained(geometry, replace(layout, tensor=2 * layout.tensor))
    assert 2 * halves.resident["weights of actor"] == pytest.approx(
        trained(geometry, layout).resident["weights of actor"]
    )


def test_recomputation_and_offloading_never_need_more(case):
    geometry, layout = case
    base = trained(geometry, replace(layout, gradient_checkpointing=False))
    assert total(trained(geometry, layout)) <= total(base)
    offloaded = trained(geometry, replace(layout, offload_optimizer=True))
    assert total(offloaded) <= total(trained(geometry, layout))


def test_more_tokens_and_fewer_devices_never_need_less(case):
    geometry, layout = case
    sizes = [total(trained(geometry, replace(layout, microbatch_tokens=2048 * n))) for n in (1, 2, 4, 16)]
    assert sizes == sorted(sizes)
    assert total(trained(geometry, replace(layout, data=2 * layout.data))) <= total(trained(geometry, layout))


def test_the_largest_phase_is_what_roles_keep_and_the_most_that_one_needs(case):
    geometry, layout = case
    roles = [
        trained(geometry, layout),
        training_memory("reference", ModelUse(geometry, 2, is_trained=False), layout, WORKLOAD),
        rollout_memory(ModelUse(geometry, 2, is_trained=False), RolloutLayout(engine="vllm", tensor=4)),
    ]
    phases = colocated_phases(roles)
    assert [phase.name for phase in phases] == ["updating actor", "running reference", "generating"]
    most = sum(role.resident_bytes for role in roles) + max(role.extra_bytes for role in roles)
    assert max(phase.total for phase in phases) == pytest.approx(most)
    assert all(phase.total == sum(phase.parts.values()) for phase in phases)


def test_a_device_lacks_what_exceeds_its_memory_with_what_engines_take_themselves():
    device = Device("card", 80 << 30, 1e15, 1e14, 3e12, 1 << 30, Efficiency(0.5, 0.8, 1e-5))
    (phase,) = colocated_phases([trained()], device)
    assert phase.parts[ENGINES] == 1 << 30
    assert phase.shortage(device) == total(trained()) + (1 << 30) - (80 << 30) < 0


def test_a_cache_counts_throughout_the_step_unless_the_rollout_sleeps():
    use = ModelUse(DENSE, 2, is_trained=False)
    cache = full_cache_bytes(use, rows=100, tokens=2048, max_sequences=64)
    assert cache == 64 * 2048 * 28 * 2 * 512 * 2
    asleep = RolloutLayout(engine="transformers", cache_bytes=cache)
    role = rollout_memory(use, asleep, bucket_bytes=256 << 20)
    assert role.resident == {"weights of the rollout": 2 * parameter_count(DENSE)}
    assert role.extra_bytes == cache and role.phases["receiving weights"] == {"transfer buckets": 256 << 20}
    awake = rollout_memory(use, replace(asleep, sleeps=False))
    assert awake.resident["cache"] == cache and awake.extra_bytes == 0


def test_a_latent_cache_holds_one_vector_per_token_and_layer():
    use = ModelUse(LATENT, 2, is_trained=False)
    assert full_cache_bytes(use, rows=1, tokens=1, max_sequences=None) == 61 * (512 + 64) * 2


def test_the_activations_of_an_update_are_those_of_a_minibatch():
    workload = Workload(64, Lengths.constant(16), Lengths.constant(48), optimizer_steps=4)
    layout = TrainingLayout(engine=TrainingEngine.single, microbatch_tokens=1 << 20, gradient_checkpointing=False)
    found = [Microbatches.of(layout, workload, is_trained=is_trained).tokens for is_trained in (True, False)]
    assert found == [16 * 64, 64 * 64]
