"""The public names, for type checkers and editors."""

from hybridflow.api.callbacks import STOP as STOP
from hybridflow.api.drawing import show as show
from hybridflow.api.experiment import Experiment as Experiment
from hybridflow.api.experiment import assemble as assemble
from hybridflow.api.experiment import plan as plan
from hybridflow.api.experiment import run as run
from hybridflow.api.result import Result as Result
from hybridflow.api.result import export as export
from hybridflow.errors import HybridflowError as HybridflowError

__version__: str
