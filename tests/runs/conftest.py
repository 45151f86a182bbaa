"""Runs on disk use float32, as users' runs do."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)
