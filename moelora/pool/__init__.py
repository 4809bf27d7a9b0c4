"""Adapters coming and going: preallocated slots on a device for the MoE layers of one model."""

from moelora.pool.pool import AdapterPool, UnknownAdapterError

__all__ = ["AdapterPool", "UnknownAdapterError"]
