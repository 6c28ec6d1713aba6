"""One set of weights, two layouts: who sends which part of which weight to whom. Read `plan.py` first.

`grouping.py` says which ranks generate together, so that little has to move; `cost.py` what moving costs.
`resharder.py` is the transition itself: `executors/` carry a plan out, `verify.py` compares both sides.
"""

from hybridflow.resharding.holdings import Holding, Piece, holdings_of
from hybridflow.resharding.plan import Gather, ReshardPlan, make_plan

__all__ = ["Holding", "Piece", "holdings_of", "Gather", "ReshardPlan", "make_plan"]
