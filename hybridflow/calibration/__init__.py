"""Measures this machine for the planner: the work of `hybridflow plan --calibrate`.

Every measurement runs in processes of its own (`processes.py`): matrix products, memory and collectives (`rates.py`),
and steps of the engines (`engines.py`). `measure.py` says which ones, and turns them into a device by the fit of
`mapping/fitting.py`.
"""
