"""Writing rows of keys and values into paged storage: the reference of ops.attention_inputs."""
