from energon_lite.batching.balance_orders import (
    StepPlan,
    global_window,
    quantile_sync,
)
from energon_lite.batching.costs import CostModel
from energon_lite.extras.samplers.measured_costs import (
    efficiency,
    fit_cost_model,
    idle_share,
    imbalance,
    pad_ratio,
)

__all__ = [
    "CostModel",
    "StepPlan",
    "efficiency",
    "fit_cost_model",
    "global_window",
    "idle_share",
    "imbalance",
    "pad_ratio",
    "quantile_sync",
]
