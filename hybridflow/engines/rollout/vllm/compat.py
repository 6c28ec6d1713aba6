"""Everything that depends on how vLLM 0.32 is built inside: looked at again with each new version.

vLLM takes a process for its own. Here it is a guest beside a training engine, so what it changes is put back.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from vllm import LLM
from vllm.model_executor.layers import utils as linear_layers
from vllm.v1.sample import sampler


def keep_plain_weights() -> None:
    """Makes CPU layers multiply with their own `weight`.

    vLLM packs each weight for oneDNN after loading and leaves an empty parameter behind: writing weights in place
    then fails or, where they are tied, silently has no effect.
    """

    def use_plain_product(layer: nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = F.linear

    linear_layers.dispatch_cpu_unquantized_gemm = use_plain_product


def avoid_compilation() -> None:
    """Replaces the one function that vLLM compiles even when told not to: 10 s at the first token on a CPU."""

    def ranks(logprobs: Tensor, chosen: Tensor) -> Tensor:
        return (logprobs >= chosen).sum(-1)

    sampler.__dict__["batched_count_greater_than"] = ranks


def leave_memory_unbound() -> None:
    """Keeps vLLM from binding all memory of this process to one NUMA node, training's included."""
    torch.ops._C.__dict__["init_cpu_memory_env"] = lambda nodes: None


@contextmanager
def guest() -> Iterator[None]:
    """Around the start of vLLM: keeps the process's random states and `torch.set_num_threads` as they were."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        # On a CPU vLLM replaces it by a warning, to protect a thread binding that is not used here.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)


def inner_model(llm: LLM) -> nn.Module:
    """vLLM's own module, whose parameters hold the weights."""
    [model] = llm.apply_model(lambda model: model)
    return model
