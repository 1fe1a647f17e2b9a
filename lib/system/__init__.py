"""This machine and its operating system: hardware, libraries, files, terminal."""
