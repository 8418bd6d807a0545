"""Tensor operations: one folder each, with the public function and its reference.

An operation knows tensors and nothing else: no engine, no model, no request. Its public function
states shapes and checks them; `reference.py` is the definition of right, in plain PyTorch.

Every operation used when decoding gives a row the same bits whatever stands beside it: batch size,
number of rows, padding. Where a PyTorch call does not promise that, the reference fixes the shape
or the order of the sum itself.
"""
