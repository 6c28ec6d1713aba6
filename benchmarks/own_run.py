"""A training run of this package for step.py: prints the seconds and the processor seconds of each step as JSON.

    python benchmarks/own_run.py grpo '{"model.path": "MODEL", "trainer.total_steps": 8}'

The run is what `hybridflow.run` makes of these settings. Processor seconds are those of this process: all of the work
with trainer.backend=local, and only the driver's with ray.
"""

import json
import sys
import time

import hybridflow


def main(algorithm: str, settings: str) -> None:
    """Runs, and prints one JSON line."""
    seconds: list[float] = []
    clock: list[float] = []

    def after_step(step: int, metrics: dict[str, float]) -> None:
        seconds.append(metrics["timing_s/step"])
        clock.append(time.process_time())

    started = time.process_time()
    hybridflow.run(algorithm, json.loads(settings), callbacks=[after_step])
    cpu_seconds = [after - before for before, after in zip([started, *clock], clock, strict=False)]
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
