"""A model: loaded, adapted, divided, asked for log-probabilities, saved."""
