"""The tour of the README as a program: make a ragged batch, compute on it, take it apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import njt


def main() -> None:
    torch.manual_seed(0)
    sentences = [torch.randn(n, 16) for n in (5, 2, 9)]
    x = njt.nested_tensor(sentences)
    print(f"a batch of {len(x)} sentences: {x}")
    print(f"packed {tuple(x.values().shape)}, padded it would be {(len(x), x.max_seqlen, 16)}")

    # any mix of layers; every sentence gives what it gives alone
    layer = torch.nn.Linear(16, 16)
    y = F.layer_norm(F.gelu(layer(x)) + x, (16,))
    for got, sentence in zip(y.unbind(), sentences, strict=True):
        alone = F.layer_norm(F.gelu(layer(sentence)) + sentence, (16,))
        torch.testing.assert_close(got, alone)
    print(f"gelu(linear(x)) + x, normalized: {tuple(y.shape)}, the same as sentence by sentence")

    # attention: heads by unflatten and transpose, no mask
    q = y.unflatten(-1, (4, 4)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
    print(f"self-attention: {tuple(out.shape)}")

    # gradients flow through it all
    out.values().square().mean().backward()
    print(f"gradient of the weight: {tuple(layer.weight.grad.shape)}")
    assert layer.weight.grad.isfinite().all()

    # to a rectangle and back
    padded = njt.to_padded_tensor(out, 0.0)
    again = njt.from_padded(padded, offsets=out.offsets())
    assert torch.equal(again.values(), out.values())
    print(f"padded {tuple(padded.shape)} and back: nothing lost")


if __name__ == "__main__":
    main()
