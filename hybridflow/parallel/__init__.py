"""Who is where: arithmetic on ranks. Read `mesh.py` first. Imports without torch."""

from hybridflow.parallel.mesh import ParallelMesh

__all__ = ["ParallelMesh"]
