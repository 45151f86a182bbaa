"""Built-in workloads: a small model with real data, for the demo, the examples and the command line."""

from fishleg.workloads.digits import Batches, augment, load_digits, normalize, split_digits
from fishleg.workloads.digits_net import DigitsNet
from fishleg.workloads.registry import WORKLOADS, Loaders, Workload

__all__ = [
    "WORKLOADS",
    "Batches",
    "DigitsNet",
    "Loaders",
    "Workload",
    "augment",
    "load_digits",
    "normalize",
    "split_digits",
]
