"""Text to token shards: sources, tokenizers, preparation, reading."""
