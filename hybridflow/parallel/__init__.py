"""Meshes of ranks, their process groups, and layouts of weights. Read `mesh.py` first.

Only `groups.py` and `collectives.py` import torch.
"""

from hybridflow.parallel.mesh import ParallelMesh

__all__ = ["ParallelMesh"]
