"""The Python interface: `hybridflow.run(...)` and what it returns. Read `experiment.py`, then `result.py`."""
