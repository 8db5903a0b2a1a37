"""One module a backend: what it serves, needs and refuses, and its two functions."""
