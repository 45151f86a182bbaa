"""A transformer: the rows of a digit as a sequence. Attention's packed projections are pruned, too."""

import torch
from digits import accuracy, loader, train
from torch import Tensor, nn

import fishleg


class RowsTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(images.squeeze(1)) + self.place).mean(1))


torch.manual_seed(0)
model = train(RowsTransformer(), epochs=15)
sparse = fishleg.prune(model, loader(labels=False), 0.8, exclude=["head", "embed"])
print(f"dense {accuracy(model):.1f} %, 80 % of the encoder's weights gone {accuracy(sparse):.1f} %")
