"""How much work a step did, and how fast."""

from hybridflow.observability.metrics import Metrics, last, total


def throughput(tokens: int, seconds: float, samples: int, *, devices: int = 1) -> Metrics:
    """`perf/*` of one step; `perf/throughput` is tokens (prompt and response) a second and device, as verl counts it.

    `seconds` is the whole step; a step that took no measurable time has throughput 0.
    """
    rate = 1.0 / seconds if seconds > 0.0 else 0.0
    return {
        "perf/total_num_tokens": total(tokens),
        "perf/time_per_step": last(seconds),
        "perf/throughput": last(tokens * rate / devices),
        "perf/samples_per_second": last(samples * rate),
    }
