from energon_lite.batching.balance_orders import (
    QuantileSync,
    StepPlan,
    global_window,
    quantile_sync,
)
from energon_lite.batching.costs import (
    CostModel,
    efficiency,
    fit_cost_model,
    idle_share,
    imbalance,
    pad_ratio,
)
from energon_lite.batching.prepare_epoch import (
    BalancedEpoch,
    CapacityPair,
    CapacityTable,
    balance_epoch,
    search_capacities,
)

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
