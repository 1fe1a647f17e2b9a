"""A finished run in forms that other programs read, each proven by its own reader."""
