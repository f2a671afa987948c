"""The client's side: a site that owns its data and its state, and answers requests."""
