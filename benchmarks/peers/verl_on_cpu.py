"""Lets verl 0.9.1 run on a CPU; what it computes is unchanged. verl itself imports this module in each of its
processes, as the environment variables of `ENVIRONMENT` ask it to."""

import functools
import importlib.metadata
import sys
from contextlib import nullcontext
from types import ModuleType

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered for "cuda" alone; it takes its device from `Cpu`
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default a large part of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or vLLM takes cores for itself and ignores OMP_NUM_THREADS
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # so that the engine's process imports this module too
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles its sampler on CPUs even with `enforce_eager`
}


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    """The CPU as a platform of verl, which has CUDA, ROCm and NPUs."""

    device_name = "cpu"
    vendor_name = "none"
    device_module: ModuleType = torch.cpu

    def is_available(self) -> bool:
        """There is always a CPU."""
        return True

    def current_device(self) -> torch.device:
        """The device that tensors are moved to."""
        return torch.device("cpu")  # verl passes it to torch, where an index would name a GPU

    def device_count(self) -> int:
        """All cores are one device."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is no other."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is asynchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seeds torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU allocator has none."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """A CPU has none."""
        return None, None

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable that Ray sets for each GPU."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> nullcontext:
        """Nothing is marked."""
        return nullcontext()

    def profiler_start(self) -> None:
        """Nothing is profiled."""

    def profiler_stop(self) -> None:
        """Nothing is profiled."""

    def ray_resource_name(self) -> str:
        """The resource of Ray that a worker takes."""
        return "GPU"  # resource pools ask for GPUs by this name; `verl_grpo.py` gives Ray one

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """Whether processes share memory of a device."""
        return False  # weights go to vLLM through shared memory

    def cudart(self) -> None:
        """There is no CUDA."""
        return None


def accept_cpu() -> None:
    """Replaces the calls that a CPU does not have."""
    import verl.utils.distributed as distributed

    for name in ("empty_cache", "ipc_collect"):
        setattr(torch.cpu, name, lambda: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda: 0)  # verl reports them as metrics
    # verl asks for "cpu:gloo" and the device's own backend, which torch refuses where they are the same device.
    name = "initialize_global_process_group_ray"
    setattr(distributed, name, functools.partial(getattr(distributed, name), backend="gloo"))


def find_vllm() -> None:
    """verl asks for the version of the package `vllm`, but the CPU build is the package `vllm-cpu`."""
    version = importlib.metadata.version

    def version_of(package: str) -> str:
        return f"{version('vllm-cpu')}+cpu" if package == "vllm" else version(package)

    importlib.metadata.version = version_of


def keep_plain_weights() -> None:
    """vLLM's CPU layers repack their weights, after which verl's `load_weights` of the next step fails."""
    import vllm.model_executor.layers.utils as layers

    def keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep_plain


def use_torch_attention() -> None:
    """verl loads a critic with FlashAttention 2, whatever the settings say; it has no CPU build."""
    from transformers import AutoModelForTokenClassification as Critic

    load = Critic.from_pretrained

    def load_with_sdpa(*args: object, **kwargs: object) -> torch.nn.Module:
        return load(*args, **{**kwargs, "attn_implementation": "sdpa"})

    Critic.from_pretrained = load_with_sdpa


def keep_unpinned() -> None:
    """verl keeps the reference's weights in pinned memory, which needs an accelerator."""
    import torch.distributed.fsdp as fsdp

    policy = fsdp.CPUOffloadPolicy
    fsdp.CPUOffloadPolicy = lambda **_: policy(pin_memory=False)


accept_cpu()
find_vllm()
keep_unpinned()
use_torch_attention()
if "vllm" in sys.modules:  # only in the engine's process: vLLM takes seconds to import
    keep_plain_weights()
