"""The actor's weights to where they are wanted: into the engine, and into a folder."""
