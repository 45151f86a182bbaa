"""Evaluation mode, gradients and autocast around a pruning."""

import torch
from helpers import inputs_6, net_6_10_4
from torch import Tensor, nn

from fishleg.runtime.modes import evaluation_mode, gradients_enabled


def test_autocast_goes_on_with_the_new_weights() -> None:
    model, x = net_6_10_4(nn.Tanh), inputs_6()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)  # which keeps copies of the weights in low precision
        with gradients_enabled(), torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert not model(x).any()


def test_dropout_of_recurrent_layers_is_off() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0][:, -1]

    model, x = Recurrent().train(), torch.randn(3, 4, 6)
    with evaluation_mode(model):
        assert torch.equal(model(x), model(x))
    assert model.lstm.dropout == 0.5
    assert not torch.equal(model(x), model(x))
