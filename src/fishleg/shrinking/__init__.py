"""Shrinking a pruned model: channels that are zero are removed, so that the model is smaller and faster.

`trace` traces the model, `channels`, `rules` and `channel_graph` find the channels that are not needed,
`resize` replaces the tensors, and `verify` compares the outputs of both models.
"""

from fishleg.shrinking.shrink import load_shrunk, shrink

__all__ = ["load_shrunk", "shrink"]
