"""Errors, roles, the protocol of server and clients, named tensors, files, names and metrics."""
