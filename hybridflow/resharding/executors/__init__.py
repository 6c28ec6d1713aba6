"""How the pieces of a plan get from their sources to their destinations. Read `interface.py` first, then `local.py`.

`send_recv.py` carries out any plan; `gather.py` uses all-gathers within micro-data-parallel groups; `shared_memory.py`
and `cuda_ipc.py` work within one machine. `factory.py` chooses.
"""

from hybridflow.resharding.executors.interface import Executor, TransferReport

__all__ = ["Executor", "TransferReport"]
