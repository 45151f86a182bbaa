"""The user's model and data: batches, loaders, random state, module modes, BatchNorm, process groups.

This package knows nothing about curvature or pruning. It depends on torch only.
"""

from fishleg.runtime.batch_errors import LoaderError, naming_the_batch
from fishleg.runtime.batches import (
    Forward,
    batch_size,
    check_parts,
    default_forward,
    has_ambiguous_size,
    inputs_of,
    map_tensors,
    move_batch,
    output_tensor,
    resize_batch,
    slice_batch,
    targets_of,
)
from fishleg.runtime.batchnorm import (
    batch_statistics_mode,
    batchnorm_input_moments,
    can_use_batch_statistics,
    refresh_batchnorm,
    refreshable_norms,
)
from fishleg.runtime.loaders import check_loader, cycle, iterate, one_pass, sub_batches
from fishleg.runtime.models import abbreviate, copy_model, functional_forward, trainable_parameters
from fishleg.runtime.modes import (
    differentiable_attention,
    eager_mode,
    evaluation_mode,
    gradients_enabled,
)
from fishleg.runtime.process_group import (
    agreed_batches,
    broadcast_from_first,
    check_not_sharded,
    is_distributed,
    is_first_process,
    mean_over_processes,
    warn_if_not_shared,
    world_size,
)
from fishleg.runtime.random_state import get_random_state, seeded, set_random_state
from fishleg.runtime.replay import Replayable
from fishleg.runtime.tensors import Tensors, at_least_float32, digest, first_non_finite, tensor_bytes

__all__ = [
    "Forward",
    "LoaderError",
    "Replayable",
    "Tensors",
    "abbreviate",
    "agreed_batches",
    "at_least_float32",
    "batch_size",
    "batch_statistics_mode",
    "batchnorm_input_moments",
    "broadcast_from_first",
    "can_use_batch_statistics",
    "check_loader",
    "check_not_sharded",
    "check_parts",
    "copy_model",
    "cycle",
    "default_forward",
    "differentiable_attention",
    "digest",
    "eager_mode",
    "evaluation_mode",
    "first_non_finite",
    "functional_forward",
    "get_random_state",
    "gradients_enabled",
    "has_ambiguous_size",
    "inputs_of",
    "is_distributed",
    "is_first_process",
    "iterate",
    "map_tensors",
    "mean_over_processes",
    "move_batch",
    "naming_the_batch",
    "one_pass",
    "output_tensor",
    "refresh_batchnorm",
    "refreshable_norms",
    "resize_batch",
    "seeded",
    "set_random_state",
    "slice_batch",
    "sub_batches",
    "targets_of",
    "tensor_bytes",
    "trainable_parameters",
    "warn_if_not_shared",
    "world_size",
]
