"""Memory of a role on each of its devices, by arithmetic from sizes: weights, training state, activations and caches.

In the order in which to read it: `systems.py` (what a training system stores), `shards.py` (the parameters of one
device), `activations.py` (the tensors of a microbatch), `training.py` and `rollout.py` (a role's memory), and
`phases.py` (roles that share devices, and what does not fit).
"""
