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
from energon_lite.loss.source_losses import SourceLosses, loss_by_source

__all__ = [
    "DeferredMean",
    "LossMode",
    "SourceLosses",
    "WeightedLabels",
    "loss_by_source",
    "step_denominator",
    "token_weight",
    "weight_total",
    "weighted_causal_lm_loss",
    "weighted_mean",
    "weighted_sum",
]
