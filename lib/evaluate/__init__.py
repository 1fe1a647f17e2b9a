"""Held-out metrics, answers, and whole files scored by all ranks."""
