"""Predicts memory and time of a step on given devices, and searches for the placement with the shortest step.

Reads no cluster and imports neither torch nor Ray. In the order in which to read it: `devices.py` (what there is),
`device_files.py` and `clusters.py` (devices from YAML, and clusters in one word), `workload.py` (what a step
processes), `layouts.py` (how a model can be parallelized), `memory/` and `timing/` (the cost models), `operations.py`
(a step as a graph of operations), `search.py` (HybridFlow, sec. 6, Algorithm 1), `planner.py` (a request and its
answer), and `explanation.py` (the answer for people: `explanation_text.py`, `figure.py`, and `changes.py`).
"""
