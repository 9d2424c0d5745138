"""The client as a task sees it: its model, its data, its optimisers, its state, and nothing of
anybody else's.
"""
