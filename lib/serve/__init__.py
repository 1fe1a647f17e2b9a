"""A finished run behind an OpenAI-compatible gateway."""
