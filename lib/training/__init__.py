"""One run: steps, local SGD, checkpoints, what a person sees of it."""
