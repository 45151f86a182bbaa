"""Data and networks that are too large to travel with the library."""

from reproduction.workloads.registry import WORKLOADS

__all__ = ["WORKLOADS"]
