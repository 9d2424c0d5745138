"""The ground: errors, roles, the protocol's types, tensors, files and metrics."""
