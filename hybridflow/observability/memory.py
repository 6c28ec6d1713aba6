"""How much memory this process, its machine and its devices use."""

import resource
import sys

import psutil

from hybridflow.observability.metrics import Metrics, maximum

_GIB = 2.0**30
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def memory_metrics() -> Metrics:
    """`perf/*_gb`, in units of 2^30 bytes under verl's names; device figures only where CUDA is in use already."""
    return {
        "perf/cpu_memory_used_gb": maximum(psutil.virtual_memory().used / _GIB),
        "perf/process_memory_gb": maximum(psutil.Process().memory_info().rss / _GIB),
        "perf/process_memory_peak_gb": maximum(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES / _GIB
        ),
        **_device_memory(),
    }


def _device_memory() -> Metrics:
    """Looks torch up among the modules that are loaded, so that asking never imports it nor creates a CUDA context."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {
        "perf/max_memory_allocated_gb": maximum(torch.cuda.max_memory_allocated() / _GIB),
        "perf/max_memory_reserved_gb": maximum(torch.cuda.max_memory_reserved() / _GIB),
    }
