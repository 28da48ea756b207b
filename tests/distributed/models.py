"""Small models for distributed tests, built equal on every rank from a seed."""

import torch
from torch import Tensor, nn

from eco_dist import ECOAdamW, Recipe, quantize_weights_, shard_model


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, residual blocks, output head; primes make every shard uneven."""

    def __init__(self, *, width: int = 37, hidden: int = 131, layers: int = 2, vocabulary: int = 23) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 0, **sizes: int) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes)


def batch(step: int, *, size: int = 4, length: int = 8, vocabulary: int = 23) -> Tensor:
    """Tokens of a step, the same on all ranks."""
    return torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: ECOAdamW, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def single(recipe: Recipe | str, *, steps: int, lr: float = 3e-3, **sizes: int) -> tuple[Net, ECOAdamW, list[float]]:
    """The same training in one process."""
    model = build(**sizes)
    quantize_weights_(model, recipe)
    optimizer = ECOAdamW(model.parameters(), lr=lr, weight_decay=0.1)
    return model, optimizer, train(model, optimizer, steps)


def sharded(recipe: Recipe | str, *, steps: int, lr: float = 3e-3, **sizes: int) -> tuple[Net, ECOAdamW, list[float]]:
    model = build(**sizes)
    shard_model(model, recipe)
    optimizer = ECOAdamW(model.parameters(), lr=lr, weight_decay=0.1)
    return model, optimizer, train(model, optimizer, steps)
