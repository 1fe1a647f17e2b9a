"""The records of a run: written, followed, sent on, priced."""
