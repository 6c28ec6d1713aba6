"""Maps a Hugging Face configuration to Megatron-Core's, and rejects models that this engine does not support."""

import logging
from functools import partial
from typing import cast

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import CoreAttentionBuilder, LinearQkvBuilder, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import PreTrainedConfig

from hybridflow.config.placement import Parallelism
from hybridflow.engines.training.megatron.attention import PackedSelfAttention
from hybridflow.engines.training.megatron.experts import GroupedExperts
from hybridflow.engines.training.megatron.stacked_linear import StackedLinear
from hybridflow.errors import EngineError
from hybridflow.models.geometry import ModelGeometry

_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class RmsNorm(nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467); with sequence parallelism, Megatron-Core sums its gradient over ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: object) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


def check_model(geometry: ModelGeometry, description: PreTrainedConfig) -> None:
    """Raises `EngineError` for a model that this engine does not support."""
    found = description.to_dict()
    uses_window = found.get("sliding_window") is not None and found.get("use_sliding_window", True)
    unsupported = {
        f"the activation '{found['hidden_act']}'": found["hidden_act"] != "silu",
        "a bias in the attention's output projection": geometry.output_bias,
        "a bias in the MLP": bool(found.get("mlp_bias")),
        "attention within a sliding window": uses_window and found["sliding_window"] < geometry.max_positions,
        "a mixture of layers with and without experts": bool(
            geometry.experts and (found.get("mlp_only_layers") or found.get("decoder_sparse_step", 1) != 1)
        ),
    }
    for what, is_there in unsupported.items():
        if is_there:
            raise EngineError(
                f"The engine megatron does not support {what}.",
                remedy="Use actor.engine=fsdp (critic.engine=fsdp) for this model.",
            )


def transformer_config(
    geometry: ModelGeometry,
    description: PreTrainedConfig,
    parallelism: Parallelism,
    *,
    dtype: torch.dtype,
    recompute: bool,
    fused_activation: bool,
) -> TransformerConfig:
    """Megatron-Core's configuration: losses are summed, not averaged, and there is no dropout.

    `fused_activation` computes SwiGLU with one `torch.compile` kernel per direction. Other fused kernels of
    Megatron-Core are off by default.
    """
    virtual = parallelism.virtual_pipeline if parallelism.virtual_pipeline > 1 else None
    return TransformerConfig(
        num_layers=geometry.layers,
        hidden_size=geometry.hidden,
        num_attention_heads=geometry.heads,
        num_query_groups=geometry.kv_heads,
        kv_channels=geometry.head_dim,
        ffn_hidden_size=geometry.intermediate,
        layernorm_epsilon=description.to_dict()["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=geometry.qkv_bias,
        qk_layernorm=geometry.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        cuda_graph_scope=[],
        calculate_per_token_loss=True,
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        sequence_parallel=divides_tokens(geometry, parallelism),
        variable_seq_lengths=parallelism.pipeline > 1,
        # With two stages and batched communication, the interleaved schedule exchanges the wrong tensors.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        bias_activation_fusion=fused_activation,
        # Megatron-Core requires this dispatcher for variable lengths, even in dense models.
        moe_token_dispatcher_type="alltoall",
        **(_experts(geometry, description, parallelism) if geometry.experts else {}),
        **(_RECOMPUTED if recompute else {}),
    )


def divides_tokens(geometry: ModelGeometry, parallelism: Parallelism) -> bool:
    """Whether tensor-parallel ranks use sequence parallelism: if configured, and always with experts.

    Megatron-Core dispatches each token to its experts from one rank, so tokens must not be replicated.
    """
    return parallelism.tensor > 1 and (parallelism.sequence_parallel or geometry.experts > 0)


def decoder_spec(geometry: ModelGeometry, layers: int) -> TransformerBlockSubmodules:
    """The modules of a chunk of layers: Megatron-Core's own except attention, norms, experts and stacked matrices."""
    spec = get_gpt_layer_local_spec(
        num_experts=geometry.experts or None, qk_layernorm=geometry.qk_norm, normalization="RMSNorm"
    )
    layer = cast(TransformerLayerSubmodules, spec.submodules)
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = cast(ModuleSpec, layer.self_attention)
    attention.module = PackedSelfAttention
    projections = cast(SelfAttentionSubmodules, attention.submodules)
    heads = (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    projections.linear_qkv = cast(LinearQkvBuilder, partial(StackedLinear, proportions=heads))
    projections.core_attention = cast(CoreAttentionBuilder, IdentityOp)
    if geometry.qk_norm:
        projections.q_layernorm = projections.k_layernorm = RmsNorm
    mlp = cast(ModuleSpec, layer.mlp)
    if geometry.experts:
        mlp = cast(ModuleSpec, cast(MoESubmodules, mlp.submodules).experts)
        mlp.module = GroupedExperts
    cast(MLPSubmodules, mlp.submodules).linear_fc1 = ModuleSpec(StackedLinear, params={"proportions": (1, 1)})
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=ModuleSpec(RmsNorm))


logger = logging.getLogger(__name__)


def has_fused_activation(device: torch.device) -> bool:
    """Whether to use Megatron-Core's fused SwiGLU: on GPUs with Triton, a C compiler and its headers.

    It is compiled at the start, so that a missing dependency shows before the first step. On CPUs, compilation costs
    more than it saves.
    """
    return device.type == "cuda" and can_compile_activation(device)


def can_compile_activation(device: torch.device) -> bool:
    """Whether `torch.compile` can compile the kernel's forward and backward pass; logs a warning if it cannot."""
    try:
        numbers = torch.zeros((2, 1, 16), device=device, requires_grad=True)
        torch.autograd.grad(bias_swiglu_impl(numbers, None).sum(), numbers)
    except RuntimeError as error:  # every failure of torch.compile is one
        reason = str(error).strip().partition("\n")[0]
        logger.warning("engine=megatron computes SwiGLU in separate kernels: torch.compile failed: %s", reason)
        return False
    return True


def _experts(
    geometry: ModelGeometry, description: PreTrainedConfig, parallelism: Parallelism
) -> dict[str, int | float | bool | str]:
    """Settings of Qwen's experts: top-k of a softmax, renormalized or not, without a load-balancing loss."""
    return {
        "num_moe_experts": geometry.experts,
        "moe_router_topk": geometry.experts_per_token,
        "moe_ffn_hidden_size": geometry.intermediate,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not description.to_dict()["norm_topk_prob"],
        "expert_model_parallel_size": parallelism.expert,
        "expert_tensor_parallel_size": parallelism.tensor,
    }
