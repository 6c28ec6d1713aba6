"""Continuous batching, one decoding step after another."""


def arrival_order(lengths: list[float]) -> list[float]:
    """Row i of the queue has the quantile whose rank is that of the fractional part of i times the golden ratio."""
    parts = [(i * 0.6180339887498949) % 1.0 for i in range(len(lengths))]
    return [sorted(lengths)[sum(other < part for other in parts)] for part in parts]


def decoding_steps(queue: list[float], limit: int) -> list[tuple[int, int]]:
    """The number of sequences in each step, and the tokens that they have generated before it, summed over them."""
    waiting = list(queue)
    running: list[list[float]] = []
    steps = []
    while waiting or running:
        while waiting and len(running) < limit:
            running.append([0, waiting.pop(0)])
        steps.append((len(running), int(sum(done for done, _ in running))))
        for sequence in running:
            sequence[0] += 1
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
    return steps
