"""Devices and models with round numbers."""

from hybridflow.mapping.devices import Cluster, Device, Efficiency
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import ModelGeometry, geometry_of

EXACT = Efficiency(matrix=1.0, bandwidth=1.0, sync_seconds=0.0)

DEVICE = Device(
    name="round",
    memory_bytes=80 * 10**9,
    matrix_flops=1e15,
    float32_flops=1e14,
    memory_bandwidth=2e12,
    reserved_bytes=10**9,
    efficiency=EXACT,
)

CLUSTER = Cluster(
    device=DEVICE,
    num_devices=64,
    devices_per_node=8,
    node_link=3e11,
    network_link=25e9,
    host_link=50e9,
    host_bytes=2**38,
)

WORKLOAD = Workload(512, Lengths.constant(512), Lengths.spread(1000, 8000), optimizer_steps=4)


def dense() -> ModelGeometry:
    """8 layers of 1,024 with 4 key-value heads of 64."""
    return geometry_of(
        {
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "intermediate_size": 4096,
            "vocab_size": 32000,
        }
    )


def mixture() -> ModelGeometry:
    """8 layers with 16 experts of 512, 2 per token."""
    return geometry_of(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "moe_intermediate_size": 512,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        }
    )
