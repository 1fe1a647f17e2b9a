"""Runs as pictures: in a browser, and in the pages that a run leaves."""
