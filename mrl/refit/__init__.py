"""The actor's weights copied into the engine in place, or out of the ranks into a Hugging Face folder."""
