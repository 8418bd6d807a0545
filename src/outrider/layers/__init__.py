"""Neural network layers. Everything that varies from pass to pass is an argument of forward()."""
