from energon_lite.batching.balance_orders import (
    StepPlan,
    global_window,
    quantile_sync,
)
from energon_lite.batching.costs import CostModel
from energon_lite.extras.samplers.measured_costs import (
    fit_cost_model,
    idle_share,
    imbalance,
)

__all__ = [
    "CostModel",
    "StepPlan",
    "fit_cost_model",
    "global_window",
    "idle_share",
    "imbalance",
    "quantile_sync",
]
