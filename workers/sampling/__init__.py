"""Draws the next token of many sequences at once."""

from workers.sampling.sampler import BatchSampler

__all__ = ["BatchSampler"]
