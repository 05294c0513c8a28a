"""Some hundred faults, a module for each room of the house; tests/mutations.py puts them into the code."""

from . import (
    caches,
    calls,
    chosen,
    codes,
    derivatives,
    files,
    gpu,
    gradients,
    kernels,
    lowering,
    shards,
    threads,
    tiles,
    transformers,
)
from .mutation import ROOT, Mutation

__all__ = ["MUTATIONS", "ROOT", "Mutation"]

MUTATIONS = (
    *kernels.MUTATIONS,
    *gradients.MUTATIONS,
    *derivatives.MUTATIONS,
    *threads.MUTATIONS,
    *tiles.MUTATIONS,
    *lowering.MUTATIONS,
    *calls.MUTATIONS,
    *caches.MUTATIONS,
    *codes.MUTATIONS,
    *chosen.MUTATIONS,
    *files.MUTATIONS,
    *gpu.MUTATIONS,
    *transformers.MUTATIONS,
    *shards.MUTATIONS,
)
