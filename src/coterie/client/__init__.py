"""The client as a task sees it: model, data, optimisers and state; batches of clients; the check of
what may leave.
"""
