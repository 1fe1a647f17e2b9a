"""Tandem's floors: each module imports only from the floors below it (see the README's tree)."""
