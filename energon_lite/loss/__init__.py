"""Losses weighted by sample and token, the same however a step's batch is cut up."""

from energon_lite.loss.causal_lm import WeightedLabels, weighted_causal_lm_loss
from energon_lite.loss.means import (
    DeferredMean,
    LossMode,
    step_denominator,
    token_weight,
    weight_total,
    weighted_mean,
    weighted_sum,
)

__all__ = [
    "DeferredMean",
    "LossMode",
    "WeightedLabels",
    "step_denominator",
    "token_weight",
    "weight_total",
    "weighted_causal_lm_loss",
    "weighted_mean",
    "weighted_sum",
]
