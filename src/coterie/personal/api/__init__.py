"""OpenAI's completions protocol over HTTP, for the models of many clients."""
