"""A program written for torch.nested's jagged layout; the import is the only line that changed.

from torch import nested          # before
import njt as nested              # now
"""

from __future__ import annotations

import torch
from torch import nn

import njt as nested


class Pooled(nn.Module):
    """A text classifier: embed, mix, average over each sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.mix = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(ids)).mean(dim=1))


def main() -> None:
    torch.manual_seed(0)
    sentences = [torch.randint(100, (n,)) for n in (4, 7, 1)]
    ids = nested.nested_tensor(sentences, layout=torch.jagged)
    assert ids.is_nested
    assert ids.layout is torch.jagged

    model = Pooled()
    scores = model(ids)
    torch.testing.assert_close(scores, torch.cat([model(s[None]) for s in sentences]))
    loss = nn.functional.cross_entropy(scores, torch.tensor([0, 1, 0]))
    loss.backward()
    print(f"{tuple(ids.shape)} -> {tuple(scores.shape)}, loss {loss.item():.3f}")

    values = torch.randn(12, 16)
    x = nested.nested_tensor_from_jagged(values, ids.offsets(), min_seqlen=1, max_seqlen=7)
    padded = x.to_padded_tensor(0.0, output_size=(3, 8, 16))
    assert padded.shape == (3, 8, 16)
    print(f"{tuple(x.shape)} padded to {tuple(padded.shape)}")


if __name__ == "__main__":
    main()
