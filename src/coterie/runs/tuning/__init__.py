"""Settings chosen on validation data: spaces, the search, and its runs."""
