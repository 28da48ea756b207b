"""Sparse mixtures of experts: router, experts, dispatch among ranks, and the megablocks adapter."""

from eco_dist.moe.config import MoEConfig
from eco_dist.moe.layer import MoELayer
from eco_dist.moe.router import Router, Routing

__all__ = ["MoEConfig", "MoELayer", "Router", "Routing"]
