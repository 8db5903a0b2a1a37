"""A stream or an event that does nothing, for engines in a process without a GPU."""


class Quiet:
    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def query(self):
        return True
