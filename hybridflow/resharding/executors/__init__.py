"""How the pieces of a plan get from their sources to their destinations. Read `interface.py` first, then `local.py`.

`send_recv.py` carries any plan; `gather.py` what groups of ranks give one another; `shared_memory.py` and `cuda_ipc.py`
what stays on one machine. `factory.py` chooses.
"""

from hybridflow.resharding.executors.interface import Executor, TransferReport

__all__ = ["Executor", "TransferReport"]
