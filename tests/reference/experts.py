"""A mixture of experts written out: every token, every chosen expert, one matrix product at a time."""

import torch
from torch import Tensor

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}


def mixture(
    x: Tensor,
    weights: dict[str, Tensor],
    *,
    experts: int,
    top_k: int,
    activation: str,
    score: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, load-balancing loss and z-loss of `x [T, D]`, in the dtype of `x`.

    `weights`: `router [E, D]`, `w1`, `w2` and perhaps `v1`, each `[E F, D]`. `capacity`: most tokens of an expert.
    """
    act = ACTIVATIONS[activation]
    logits = x @ weights["router"].T
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    matrices = {name: weights[name].view(experts, -1, x.shape[-1]) for name in ("w1", "w2", "v1") if name in weights}
    counts = [0] * experts
    rows = []
    for token in range(x.shape[0]):
        chosen = torch.topk(scores[token], top_k)
        factors = chosen.values / chosen.values.sum() if normalize else chosen.values
        row = torch.zeros_like(x[token])
        for factor, expert in zip(factors * scale, chosen.indices.tolist(), strict=True):
            counts[expert] += 1
            if capacity is not None and counts[expert] > capacity:
                continue
            hidden = act(matrices["w1"][expert] @ x[token])
            if "v1" in matrices:
                hidden = hidden * (matrices["v1"][expert] @ x[token])
            row = row + factor * (hidden @ matrices["w2"][expert])
        rows.append(row)
    shares = scores if score == "softmax" else scores / scores.sum(-1, keepdim=True)
    load = torch.tensor(counts, dtype=x.dtype)
    balance = experts / (x.shape[0] * top_k) * (load * shares.mean(0)).sum()
    return torch.stack(rows), balance, logits.logsumexp(-1).square().mean()
