from energon_lite.batching.capacities import CapacityPair, CapacityTable, search_capacities
from energon_lite.batching.costs import CostModel, fit_cost_model
from energon_lite.batching.global_window import StepPlan, global_window
from energon_lite.batching.imbalance import efficiency, idle_share, imbalance, pad_ratio
from energon_lite.batching.prepare_epoch import BalancedEpoch, balance_epoch
from energon_lite.batching.quantile_sync import QuantileSync, quantile_sync

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
