"""Ranks on many hosts: checked, started, watched, started again."""
