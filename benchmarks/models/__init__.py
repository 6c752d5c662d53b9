"""Parameter sets of well-known models, as shapes."""
