"""Predicts memory and time of a step on given devices, and searches for the placement with the shortest step.

Reads no cluster and imports neither torch nor Ray. In the order in which to read it:

- what there is: `devices.py`, and `device_files.py` and `clusters.py` (devices from YAML, and clusters in one word)
- what runs: `workload.py` (what a step processes), `layouts.py` (how a model can be parallelized), `operations.py` (a
  step as a graph of operations) and `request.py` (the input of the planner)
- the cost models, of one layout or row by row of many (`elementwise.py`): `memory/` and `timing/`; `candidates.py` and
  `costs.py` (the layouts of a role, with their costs)
- the search (HybridFlow, sec. 6, Algorithm 1): `schedule.py` (the length of a step), `partitions.py` (placements),
  `tables.py` and `allocations.py` (options and devices of one placement), `search.py`, and `planner.py` (the answer)
- the answer for people: `changes.py`, `contents.py`, `explanation.py`, `explanation_text.py` and `figure.py`
- measured steps: `given_step.py`, `measured.py` and `comparison.py` (predicted and measured), `fitting.py` (constants)
"""
