"""EmbeddingGemma 2 for MLX."""

__version__ = "0.1.0.dev0"
