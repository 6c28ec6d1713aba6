"""Workers as Ray actors: one process per device, calls as futures, batches in shared memory.

Only this package imports Ray. Read `backend.py` first, then `placement.py` (which device each rank gets) and `watch.py`
(how failures are detected).
"""

from hybridflow.controller.backends.ray.backend import RayBackend

__all__ = ["RayBackend"]
