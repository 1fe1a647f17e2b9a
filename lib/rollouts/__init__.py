"""Answers that the model in training writes itself, judged and learnt from, round by round."""
