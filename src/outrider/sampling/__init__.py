"""From a request's sampling parameters and the target's logits to a token."""
