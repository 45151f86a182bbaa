from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("fishleg", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("fishleg")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """The message of pyproject.toml's rule, in the category that later versions of torch give it."""
    rule = "ignore:`torch.jit.script(_method)?` is (deprecated|not supported):FutureWarning"
    config.addinivalue_line("filterwarnings", rule)


@pytest.fixture(autouse=True)
def _float64_and_seeded() -> Iterator[None]:
    """Modules and tensors are float64 unless a test says otherwise, and the global seed is fixed."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
