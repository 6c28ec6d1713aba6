"""One set of weights in two layouts: which rank sends which part of which weight to which rank. Read `plan.py` first.

`grouping.py` decides which ranks generate together, so that few weights move. `resharder.py` runs the transfers:
`executors/` carry out a plan, `verify.py` compares both sides.
"""

from hybridflow.resharding.holdings import Holding, Piece
from hybridflow.resharding.plan import Gather, ReshardPlan, make_plan

__all__ = ["Holding", "Piece", "Gather", "ReshardPlan", "make_plan"]
