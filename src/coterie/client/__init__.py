"""The client as a task sees it, batches of clients, and the check of what may leave."""
