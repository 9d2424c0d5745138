"""From a recipe to its result: preparation, rounds, evaluation, checkpoints, devices, adaptation to
new clients.
"""
