"""Rounds: the model answers prompts, a judge scores the answers, and what was better is preferred."""
