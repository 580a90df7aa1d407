"""Pure functions that load ranks alike: what packs cost, and which meet in a step.

| file | what it has |
|---|---|
| `costs` | what a pack costs, and how to find that out from measured times |
| `metrics` | imbalance, idle share, padding |
| `quantile_sync` | an order for ranks that pack their own streams and cannot talk |
| `global_window` | a plan of steps that all ranks share |
| `epoch` | packs with limits on tiles and tokens, and their plan, in one call |
| `capacities` | which limits on tiles and tokens waste the least |
"""

from energon_lite.balance.capacities import CapacityPair, CapacityTable, search_capacities
from energon_lite.balance.costs import CostModel, fit_cost_model
from energon_lite.balance.epoch import BalancedEpoch, balance_epoch
from energon_lite.balance.global_window import StepPlan, global_window
from energon_lite.balance.metrics import efficiency, idle_share, imbalance, pad_ratio
from energon_lite.balance.quantile_sync import QuantileSync, quantile_sync

__all__ = [
    "BalancedEpoch",
    "CapacityPair",
    "CapacityTable",
    "CostModel",
    "QuantileSync",
    "StepPlan",
    "balance_epoch",
    "efficiency",
    "fit_cost_model",
    "global_window",
    "idle_share",
    "imbalance",
    "pad_ratio",
    "quantile_sync",
    "search_capacities",
]
