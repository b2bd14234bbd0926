"""The one exception of this package's boundary."""


class EgemmaError(ValueError):
    """Bad input: what was expected, what came, and in which file, tensor or argument.

    Everything that a caller can get wrong (a path, a checkpoint, a text, an option) raises this, with a message
    that stands alone; the command line prints it without a traceback and exits with 2.
    """
