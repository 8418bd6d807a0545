"""The convolution in front of the delta rule: a part of the reference of ops.gated_delta_net."""
