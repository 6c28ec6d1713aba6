"""SwiGLU in one kernel each way, where `torch.compile` can make it."""

import logging

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

logger = logging.getLogger(__name__)


def has_fused_activation(device: torch.device) -> bool:
    """Whether Megatron-Core's fused SwiGLU can be used on a device: on GPUs with Triton, a C compiler and its headers.

    It is tried on a few numbers, so that what is missing is found at the start and not in the first step. On CPUs,
    compiling it costs more than it saves.
    """
    return device.type == "cuda" and can_compile_activation(device)


def can_compile_activation(device: torch.device) -> bool:
    """Whether `torch.compile` makes both passes of the kernel; logs a warning if it does not."""
    try:
        numbers = torch.zeros((2, 1, 16), device=device, requires_grad=True)
        torch.autograd.grad(bias_swiglu_impl(numbers, None).sum(), numbers)
    except RuntimeError as error:  # every failure of torch.compile is one
        reason = str(error).strip().partition("\n")[0]
        logger.warning("engine=megatron computes SwiGLU in separate kernels: torch.compile failed: %s", reason)
        return False
    return True
