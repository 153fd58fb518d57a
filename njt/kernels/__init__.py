"""Kernels over plain tensors: packed rows, segments of them, padded rectangles. Usable without the subclass."""
