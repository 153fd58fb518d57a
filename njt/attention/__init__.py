"""Attention on ragged batches: packed kernels here, the meaning of nested arguments in `sdpa`."""
