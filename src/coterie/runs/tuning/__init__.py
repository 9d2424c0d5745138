"""Settings chosen on validation data: what is searched, the search, and its runs."""
