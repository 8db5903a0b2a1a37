"""The portable attention kernel: its plan and its source."""
